// The tokens of an answer with their probabilities. The pointer or the arrow keys choose a token; its alternatives are shown.

import { announce, make } from "./dom.js";

/** The colour of a token gets one step stronger below each of these probabilities. */
const BANDS = [0.95, 0.7, 0.4, 0.1];

/** Pixels between a token and its alternatives. */
const GAP = 4;

export class TokensView {
  constructor() {
    this._tokens = [];
    this._decoder = new TextDecoder();
    this._chosen = null;
    this._tip = make("div", { class: "token-tip", hidden: true });
    this._list = make("div", { class: "tokens", tabindex: "0", role: "group",
      "aria-label": "Tokens of the answer. Arrow keys move from token to token.",
      onpointerover: (event) => this._show(indexOf(event.target)), onpointerleave: () => this._hide(),
      onfocus: () => this._show(this._chosen ?? 0), onblur: () => this._hide(), onkeydown: (event) => this._move(event) });
    this.element = make("div", { class: "tokens-view" }, this._list, this._tip);
  }

  /** Adds the tokens that are new. */
  update(tokens) {
    const added = tokens.slice(this._tokens.length);
    for (const token of added) {
      const text = this._decoder.decode(new Uint8Array(token[0]), { stream: true });
      const probability = Math.exp(token[1]);
      const band = BANDS.filter((least) => probability < least).length;
      this._list.append(make("span", { class: `token band-${band}`, "data-index": this._tokens.length }, text));
      this._tokens.push(token);
    }
  }

  /** The keyboard: chooses another token, and announces it. */
  _move(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (steps === undefined) {
      if (event.key === "Escape") this._hide();
      return;
    }
    event.preventDefault();
    const index = Math.min(this._tokens.length - 1, Math.max(0, (this._chosen ?? 0) + steps));
    this._show(index);
    const [, logprob, others] = this._tokens[index];
    announce(`${spoken(this._list.children[index].textContent)}, ${percent(logprob)}. ${others.map(([text, one]) => `${spoken(text)} ${percent(one)}`).join(", ")}`);
  }

  /** Chooses a token, and shows its alternatives. */
  _show(index) {
    const span = index === null ? null : this._list.children[index];
    if (!span) return;
    this._list.children[this._chosen]?.classList.remove("is-chosen");
    this._chosen = index;
    span.classList.add("is-chosen");
    const [, logprob, others] = this._tokens[index];
    this._tip.replaceChildren(
      make("div", {}, make("code", {}, visible(span.textContent)), ` ${percent(logprob)} `, make("small", {}, logprob.toFixed(3))),
      ...(others.length ? [make("table", {}, make("tbody", {}, others.map(([text, one]) =>
        make("tr", {}, make("td", {}, make("code", {}, visible(text))), make("td", { class: "to-right" }, percent(one))))))] : []));
    this._tip.hidden = false;
    this._place(span);
  }

  /** Places the tip below the token, inside the width of the answer; above the token if the visible part has no room below. */
  _place(span) {
    const left = Math.max(0, Math.min(span.offsetLeft, this.element.clientWidth - this._tip.offsetWidth));
    const { offsetTop, offsetHeight } = span;
    const { offsetHeight: height } = this._tip;
    const end = this.element.closest(".log")?.getBoundingClientRect().bottom ?? Infinity;
    const isBelow = span.getBoundingClientRect().bottom + height + GAP < end;
    this._tip.style.left = `${left}px`;
    this._tip.style.top = `${isBelow ? offsetTop + offsetHeight + GAP : offsetTop - height - GAP}px`;
  }

  _hide() {
    this._tip.hidden = true;
    this._list.children[this._chosen]?.classList.remove("is-chosen");
  }
}

function indexOf(target) {
  const index = target.getAttribute("data-index");
  return index === null ? null : Number(index);
}

export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value >= 0.1 || value === 0 ? `${value.toFixed(1)} %` : `${value.toPrecision(1)} %`;
}

/** Replaces white space by visible signs. */
function visible(text) {
  return text.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "(part of a character)";
}

function spoken(text) {
  return text.trim() || (text.includes("\n") ? "new line" : "white space");
}

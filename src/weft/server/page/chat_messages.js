// The messages of the open conversation. Each message has a view, which is kept while the message is shown.

import { MarkdownView } from "./chat_markdown.js";
import { endOf, figuresOf } from "./chat_stream.js";
import { TokensView } from "./chat_tokens.js";
import { openCalls, path, versions } from "./chat_tree.js";
import { button, copy, growing, make } from "./dom.js";

/** `actions`: editQuestion(node, text), askAgain(node), choose(node, buttonName), giveResults(answer, results), copyAs(kind, node, button). */
export class MessageList {
  constructor(element, actions) {
    this._element = element;
    this._actions = actions;
    this._conversation = null;
    this._views = new Map();
  }

  /** Shows the messages. Views of messages that are shown already stay. */
  show(conversation) {
    if (conversation !== this._conversation) {
      this._views.clear();
      this._element.replaceChildren();
      this._conversation = conversation;
    }
    const nodes = path(conversation);
    const shown = new Set(nodes.map((node) => node.id));
    for (const [id, view] of this._views) {
      if (shown.has(id)) continue;
      view.element.remove();
      this._views.delete(id);
    }
    nodes.forEach((node, index) => {
      let view = this._views.get(node.id);
      if (!view) this._views.set(node.id, view = new VIEWS[node.role](node, this._actions));
      if (this._element.children[index] !== view.element) this._element.insertBefore(view.element, this._element.children[index] ?? null);
      view.showVersions?.(versions(conversation, node));
      view.update({ isLast: index === nodes.length - 1, number: 1 + nodes.slice(0, index).filter((one) => one.role === node.role).length,
        calls: conversation.nodes[node.parent]?.calls });
    });
  }

  /** Shows the new part of an answer. */
  grow(node) {
    this._views.get(node.id)?.grow();
  }
}

class Versions {
  constructor(actions) {
    this._actions = actions;
    this._text = make("span", {});
    this._earlier = button("left", "Earlier version", () => this._step(-1));
    this._later = button("right", "Later version", () => this._step(1));
    this.element = make("span", { class: "versions", role: "group", "aria-label": "Versions" }, this._earlier, this._text, this._later);
  }

  show(node, all) {
    this._all = all;
    this._index = all.indexOf(node);
    this.element.hidden = all.length < 2;
    this._text.textContent = `${this._index + 1} / ${all.length}`;
    this._earlier.setAttribute("aria-disabled", this._index === 0);
    this._later.setAttribute("aria-disabled", this._index === all.length - 1);
  }

  _step(by) {
    const node = this._all[this._index + by];
    if (node) this._actions.choose(node, by < 0 ? "Earlier version" : "Later version");
  }
}

class UserView {
  constructor(node, actions) {
    this._node = node;
    this._actions = actions;
    this._text = make("div", { class: "bubble" }, node.text);
    this._versions = new Versions(actions);
    const copyButton = button("copy", "Copy the question", () => copy(node.text, copyButton));
    this._edit = button("pen", "Edit and ask again", () => this._beginEdit());
    this._bar = make("div", { class: "message-bar" }, this._versions.element, this._edit, copyButton);
    this.element = make("article", { class: "message user" }, this._text, this._bar);
  }

  update({ number }) {
    this.element.setAttribute("aria-label", `Question ${number}`);
  }

  showVersions(all) {
    this._versions.show(this._node, all);
  }

  _beginEdit() {
    const area = growing({ "aria-label": "The question", value: this._node.text, onkeydown: (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
      else return;
      event.preventDefault();
    } });
    const submit = (event) => {
      event.preventDefault();
      if (!area.value.trim()) return;
      close();
      this._actions.editQuestion(this._node, area.value);
    };
    const cancel = () => {
      close();
      this._edit.focus();
    };
    const close = () => {
      form.replaceWith(this._text);
      this._bar.hidden = false;
    };
    const form = make("form", { class: "edit", onsubmit: submit }, area, make("div", { class: "row end" },
      make("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"),
      make("button", { type: "submit", class: "main" }, "Ask again")));
    this._text.replaceWith(form);
    this._bar.hidden = true;
    area.focus();
  }
}

class AnswerView {
  constructor(node, actions) {
    this._node = node;
    this._actions = actions;
    this._shown = { text: 0, thoughts: 0 };
    this._thoughtsText = make("div", { class: "prose" });
    this._thoughtsTitle = make("summary", {}, "Thoughts");
    this._thoughts = make("details", { class: "thoughts", hidden: true }, this._thoughtsTitle, this._thoughtsText);
    // Markdown would change the white space and the marks of JSON.
    const isPlain = !["text", undefined].includes(node.request.response_format?.type);
    this._text = make("div", { class: isPlain ? "prose mono plain" : "prose" });
    this._markdown = { text: new (isPlain ? PlainView : MarkdownView)(this._text), thoughts: new MarkdownView(this._thoughtsText) };
    this._tokens = null;
    this._calls = make("div", { class: "calls" });
    this._end = make("p", { class: "hint", hidden: true });
    this._error = make("div", { class: "answer-error", role: "alert", hidden: true });
    this._figures = make("span", { class: "figures" });
    this._versions = new Versions(actions);
    this._tokensButton = make("button", { type: "button", class: "quiet", "aria-pressed": "true", hidden: true, onclick: () => this._toggleTokens() }, "Tokens");
    const copyButton = button("copy", "Copy the answer", () => copy(node.text, copyButton));
    const asButton = (kind, text, label) => {
      const one = make("button", { type: "button", class: "quiet", title: label, "aria-label": label, onclick: () => actions.copyAs(kind, node, one) }, text);
      return one;
    };
    this._bar = make("div", { class: "message-bar" }, this._versions.element,
      button("again", "Make the answer again", () => actions.askAgain(node)), copyButton,
      asButton("curl", "curl", "Copy the request as curl"), asButton("python", "Python", "Copy the request as Python"),
      this._tokensButton, this._figures);
    this.element = make("article", { class: "message assistant" }, this._thoughts, this._text, this._calls, this._end, this._error, this._bar);
    this.grow();
  }

  showVersions(all) {
    this._versions.show(this._node, all);
  }

  update({ isLast, number }) {
    this.element.setAttribute("aria-label", `Answer ${number}`);
    this._isLast = isLast;
    this.grow();
  }

  grow() {
    const { text, thoughts, tokens, state } = this._node;
    const isRunning = state === "running";
    this.element.classList.toggle("is-running", isRunning);
    this._add("thoughts", thoughts);
    this._add("text", text);
    if (!isRunning) for (const one of Object.values(this._markdown)) one.end();
    this._thoughts.hidden = !thoughts;
    this._thoughtsTitle.textContent = isRunning && !text && !this._node.calls.length ? "Thinking…" : "Thoughts";
    if (tokens) this._showTokens(tokens);
    this._showCalls();
    const end = endOf(this._node);
    this._end.hidden = !end;
    this._end.textContent = end;
    this._showError();
    this._bar.hidden = isRunning;
    if (!isRunning) this._figures.textContent = figuresText(this._node);
  }

  _add(name, text) {
    if (text.length === this._shown[name]) return;
    this._markdown[name].add(text.slice(this._shown[name]));
    this._shown[name] = text.length;
  }

  _showTokens(tokens) {
    if (!this._tokens) {
      this._tokens = new TokensView();
      this._text.after(this._tokens.element);
      this._tokensButton.hidden = false;
      this._text.hidden = true;
    }
    this._tokens.update(tokens);
  }

  _toggleTokens() {
    const isOn = this._tokens.element.hidden;
    this._tokens.element.hidden = !isOn;
    this._text.hidden = isOn;
    this._tokensButton.setAttribute("aria-pressed", String(isOn));
  }

  /** Shows the tool calls. The last answer also gets a form for their results. */
  _showCalls() {
    const { calls } = this._node;
    while (this._calls.children.length < calls.length) this._calls.append(make("section", { class: "call" }, make("h3", {}), make("pre", { tabindex: "0" })));
    calls.forEach(({ name, text }, index) => {
      const [title, pre] = this._calls.children[index].children;
      if (title.textContent !== name) {
        title.replaceChildren(make("code", {}, name));
        pre.setAttribute("aria-label", `Arguments of ${name}`);
        pre.setAttribute("role", "group");
      }
      const shown = this._node.state === "running" ? text : pretty(text);
      if (pre.textContent !== shown) pre.textContent = shown;
    });
    const needsResults = Boolean(this._isLast && openCalls(this._node).length);
    if (needsResults && !this._form) {
      this._form = resultsForm(calls, [], (results) => this._actions.giveResults(this._node, results));
      this._end.after(this._form);
      if (!document.activeElement?.value) this._form.querySelector("textarea").focus({ preventScroll: true });
    } else if (!needsResults && this._form) {
      this._form.remove();
      this._form = null;
    }
  }

  _showError() {
    const { error } = this._node;
    this._error.hidden = !error;
    if (!error || this._error.childElementCount) return;
    this._error.append(make("p", {}, error.text), ...(error.hint ? [make("p", { class: "hint" }, error.hint)] : []),
      button("again", "Try again", () => this._actions.askAgain(this._node), { isShort: false }));
  }
}

/** Shows text as it is, with the methods of MarkdownView. */
class PlainView {
  constructor(root) {
    this._text = document.createTextNode("");
    root.append(this._text);
  }

  add(text) {
    this._text.appendData(text);
  }

  end() {}
}

class ResultsView {
  constructor(node, actions) {
    this._node = node;
    this._actions = actions;
    this._results = make("div", {});
    this._versions = new Versions(actions);
    this._edit = button("pen", "Edit the results and go on", () => this._beginEdit());
    this.element = make("article", { class: "message tool" }, this._results,
      make("div", { class: "message-bar" }, this._versions.element, this._edit));
  }

  update({ number, calls }) {
    this._calls = calls;
    this.element.setAttribute("aria-label", `Results ${number}`);
    if (this._results.childElementCount) return;
    this._results.append(...this._node.results.map(({ text }, index) => {
      const { name } = calls[index];
      return make("section", { class: "call" }, make("h3", {}, "Result of ", make("code", {}, name)),
        make("pre", { tabindex: "0", role: "group", "aria-label": `Result of ${name}` }, text));
    }));
  }

  showVersions(all) {
    this._versions.show(this._node, all);
  }

  _beginEdit() {
    const close = () => {
      form.replaceWith(this._results);
      this._edit.hidden = false;
    };
    const form = resultsForm(this._calls, this._node.results, (results) => {
      close();
      this._actions.giveResults({ id: this._node.parent }, results);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      close();
      this._edit.focus();
    });
    this._results.replaceWith(form);
    this._edit.hidden = true;
    form.querySelector("textarea").focus();
  }
}

const VIEWS = { user: UserView, assistant: AnswerView, tool: ResultsView };

/** A form with a field for the result of each call. */
function resultsForm(calls, given, submit) {
  const areas = calls.map(({ name }, index) => make("textarea", { rows: "3", class: "mono", value: given[index]?.text ?? "",
    "aria-label": calls.length > 1 ? `Result ${index + 1} of ${name}` : `Result of ${name}`, placeholder: `What ${name} returns` }));
  return make("form", { class: "results", onsubmit: (event) => {
    event.preventDefault();
    submit(calls.map(({ id }, index) => ({ id, text: areas[index].value })));
  } }, ...areas.map((area, index) => make("div", {}, make("span", { class: "hint" }, "Result of ", make("code", {}, calls[index].name)), area)),
  make("button", { type: "submit", class: "main" }, calls.length > 1 ? "Send the results" : "Send the result"));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function figuresText(node) {
  const { firstSeconds, tokens, isEstimate, rate, promptTokens, cachedTokens } = figuresOf(node);
  const parts = [];
  if (rate !== null) parts.push(`${rate < 100 ? rate.toFixed(1) : Math.round(rate)} tokens/s`);
  if (firstSeconds !== null) parts.push(`${firstSeconds.toFixed(2)} s to first token`);
  if (tokens !== null) parts.push(`${isEstimate ? "about " : ""}${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  if (promptTokens !== null) parts.push(`prompt ${promptTokens}${cachedTokens ? ` (${cachedTokens} cached)` : ""}`);
  return parts.join(" · ");
}

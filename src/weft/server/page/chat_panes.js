// The list of conversations on the left and the settings on the right. In a narrow window each covers the chat.

import { button, make } from "./dom.js";

const NARROW = matchMedia("(max-width: 56rem)");
const WIDE = matchMedia("(min-width: 88rem)");

export class Panes {
  /** `left` and `right`: {element, label}. `bar(leftButton, rightButton)` makes the bar above `main`. */
  constructor({ left, main, right, bar }) {
    this._main = main;
    this._panes = { left: this._pane("left", left, "menu"), right: this._pane("right", right, "sliders") };
    main.prepend(bar(this._panes.left.opener, this._panes.right.opener));
    this.element = make("div", { class: "chat" }, this._panes.left.element, main, this._panes.right.element);
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isNarrow && !event.defaultPrevented) this.closeIfNarrow();
    });
    for (const query of [NARROW, WIDE]) query.addEventListener("change", () => this._reset());
    this._reset();
  }

  get isNarrow() {
    return NARROW.matches;
  }

  open(name) {
    this._set(name, true);
  }

  closeIfNarrow() {
    if (!this.isNarrow) return;
    const focused = Object.values(this._panes).find(({ element }) => element.contains(document.activeElement));
    for (const name of Object.keys(this._panes)) this._set(name, false);
    focused?.opener.focus();
  }

  _pane(name, { element, label }, iconName) {
    const opener = button(iconName, label, () => this._toggle(name), { "aria-expanded": "false", "aria-controls": `pane-${name}` });
    const close = button("close", `Close ${label.toLowerCase()}`, () => {
      this._set(name, false);
      opener.focus();
    }, { class: "icon-button pane-close" });
    const pane = make("aside", { id: `pane-${name}`, class: `pane ${name}`, "aria-label": label },
      make("header", {}, make("h2", {}, label), close), element);
    return { element: pane, opener, close };
  }

  _toggle(name) {
    const { element, close } = this._panes[name];
    this._set(name, element.hidden);
    if (!element.hidden && this.isNarrow) close.focus();
  }

  _set(name, isOpen) {
    const { element, opener } = this._panes[name];
    element.hidden = !isOpen;
    opener.setAttribute("aria-expanded", String(isOpen));
    const isCovered = this.isNarrow && Object.values(this._panes).some((one) => !one.element.hidden);
    this._main.inert = isCovered;
  }

  _reset() {
    this._set("left", !this.isNarrow);
    this._set("right", WIDE.matches);
  }
}

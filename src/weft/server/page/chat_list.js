// The list of conversations: open, rename, delete. The list keeps no data: `ConversationStore` does.

import { button, make } from "./dom.js";

export class ConversationList {
  /** `actions`: open(id), create(), rename(id, title), remove(id). The promise of `rename` resolves when the list has the title. */
  constructor(actions) {
    this._actions = actions;
    this._list = make("ul", {});
    this._hint = make("p", { class: "hint" });
    this.element = make("nav", { class: "conversations", "aria-label": "Conversations" },
      button("plus", "New chat", () => actions.create(), { isShort: false, class: "quiet new-chat" }), this._list, this._hint);
  }

  /** `titles`: [{id, title}], newest first. */
  show(titles, { openId, runningIds, isLasting }) {
    if (this._list.querySelector("input")) return; // a title is being typed
    const focused = document.activeElement?.closest("li")?.getAttribute("data-id");
    const index = focused ? [...document.activeElement.closest("li").querySelectorAll("button")].indexOf(document.activeElement) : -1;
    this._list.replaceChildren(...titles.map((one) => this._item(one, one.id === openId, runningIds.has(one.id))));
    this._hint.textContent = isLasting ? "They are kept in this browser only." : "This browser keeps nothing: they end with this page.";
    if (index < 0) return;
    const item = this._list.querySelector(`[data-id="${focused}"]`);
    (item ? item.querySelectorAll("button")[index] : this.element.querySelector(".new-chat"))?.focus();
  }

  _item({ id, title }, isOpen, isRunning) {
    const name = title || "Without a title";
    const item = make("li", { "data-id": id, class: isOpen ? "is-open" : null },
      make("button", { type: "button", class: "title", title: name, "aria-current": isOpen ? "true" : null, onclick: () => this._actions.open(id) },
        name, isRunning && make("span", { class: "unseen" }, " (an answer arrives)")),
      isRunning && make("i", { class: "pulse" }),
      button("pen", `Rename ${name}`, () => this._rename(item, id, title)),
      button("trash", `Delete ${name}`, () => this._actions.remove(id)));
    return item;
  }

  /** Replaces an entry by a text field until Enter, Escape, or a loss of focus. */
  _rename(item, id, title) {
    let isOpen = true;
    const finish = async (text) => {
      if (!isOpen) return;
      isOpen = false;
      const hadFocus = document.activeElement === input;
      input.remove();
      await this._actions.rename(id, text.trim() || title);
      if (hadFocus) this._list.querySelector(`[data-id="${id}"] .title`)?.focus();
    };
    const input = make("input", { "aria-label": "Title", value: title, maxlength: "120", onblur: () => finish(input.value),
      onkeydown: (event) => {
        if (event.key === "Enter") finish(input.value);
        else if (event.key === "Escape") finish(title);
        else return;
        event.preventDefault();
        event.stopPropagation();
      } });
    item.replaceChildren(input);
    input.focus();
    input.select();
  }
}

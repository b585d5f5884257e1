// The dialog that asks for an API key.

import { make } from "./dom.js";

/** Resolves to the key, or to null if the dialog is closed without one. */
export function askForKey(message) {
  return new Promise((resolve) => {
    const input = make("input", { type: "password", id: "key-input", autocomplete: "off", spellcheck: "false", required: true });
    function submitted(event) {
      event.preventDefault();
      finish(input.value.trim());
    }
    const dialog = make("dialog", { class: "small", "aria-labelledby": "key-title" },
      make("form", { method: "dialog", onsubmit: submitted },
        make("h2", { id: "key-title" }, "API key"),
        make("p", {}, message),
        make("label", { for: "key-input" }, "Key"),
        input,
        make("p", { class: "hint" }, "It stays in this tab, and is sent to this server only."),
        make("div", { class: "row end" },
          make("button", { type: "button", class: "quiet", onclick: () => finish("") }, "Cancel"),
          make("button", { type: "submit", class: "main" }, "Use this key"))));
    let isOpen = true;
    function finish(key) {
      if (!isOpen) return;
      isOpen = false;
      dialog.close();
      dialog.remove();
      resolve(key || null);
    }
    dialog.addEventListener("close", () => finish(""));
    document.body.append(dialog);
    dialog.showModal();
  });
}

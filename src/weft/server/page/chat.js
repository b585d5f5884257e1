// The chat.

import { make } from "./dom.js";

export function mountChat(root, { api }) {
  root.append(make("p", { class: "notice" }, "The chat comes here."));
}

// The live view and the replay. `info` is the answer of /live/info; its `mode` is "live" or "replay".

import { make } from "./dom.js";

/** Draws into `root`. The page calls `hide()` when another tab is opened, and `show()` when it is opened again. */
export function mountLive(root, { info, api }) {
  root.append(make("p", { class: "notice" }, `${info.model}: ${info.num_blocks} blocks`));
  return { show() {}, hide() {} };
}

// The shell: tabs, the API key, and which view is open.

import { Api, ApiError } from "./api.js";
import { button, make } from "./dom.js";
import { askForKey } from "./keys.js";
import { mountChat } from "./chat.js";
import { mountLive } from "./live.js";

const api = new Api(askForKey);
const root = document.getElementById("views");
const tabList = document.getElementById("tabs");

/** Name -> {title, mount, panel, tab, view}. When the view is first opened, `mount(panel)` makes it: {show(), hide()}. */
const views = new Map();
let open = null;

function addView(name, title, mount) {
  const panel = make("div", { role: "tabpanel", id: "view-" + name, class: "view", "aria-labelledby": "tab-" + name, hidden: true });
  const tab = make("button", { type: "button", role: "tab", id: "tab-" + name, "aria-controls": panel.id,
    "aria-selected": "false", tabindex: "-1", onclick: () => show(name) }, title);
  tabList.append(tab);
  root.append(panel);
  views.set(name, { title, mount, panel, tab, view: null });
}

function show(name) {
  if (open === name) return;
  if (open) {
    const { panel, tab, view } = views.get(open);
    panel.hidden = true;
    tab.setAttribute("aria-selected", "false");
    tab.tabIndex = -1;
    view?.hide?.();
  }
  const entry = views.get(name);
  open = name;
  entry.panel.hidden = false;
  entry.tab.setAttribute("aria-selected", "true");
  entry.tab.tabIndex = 0;
  document.title = `${entry.title} · weft`;
  history.replaceState(null, "", "#" + name);
  if (entry.view) entry.view.show?.();
  else entry.view = entry.mount(entry.panel) || {};
}

/** Arrow keys move between tabs, as in every list of tabs. */
tabList.addEventListener("keydown", (event) => {
  const names = [...views.keys()];
  const at = names.indexOf(open);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  show(names[(to + names.length) % names.length]);
  views.get(open).tab.focus();
});

/** Mounts the live view when `/live/info` has answered. Until then, shows why it has not. Mounts the view again if a
 *  restarted server has another `info`. */
function liveView(panel, info) {
  const shell = { view: null, show: () => shell.view?.show?.(), hide: () => shell.view?.hide?.() };
  function mount(found) {
    shell.view?.close();
    panel.replaceChildren();
    shell.view = mountLive(panel, { info: found, api, onOtherInfo: mount });
    if (panel.hidden) shell.view.hide();
  }
  /** Reads `info` if it is not known, and mounts the view. */
  async function load() {
    panel.replaceChildren(make("p", { class: "notice" }, "Loading…"));
    try {
      info ??= await api.json("live/info");
      mount(info);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      panel.replaceChildren(refusal(error, load));
    }
  }
  load();
  return shell;
}

/** What is shown instead of the live view. */
function refusal(error, load) {
  const needsAdmin = error.status === 403;
  const text = needsAdmin ? "The live view needs an admin key of this server." : error.message;
  async function askAgain() {
    const key = await askForKey(text);
    if (key) {
      api.key = key;
      load();
    }
  }
  return make("div", { class: "notice", role: "alert" }, make("p", {}, text),
    needsAdmin && make("p", { class: "hint" }, error.message),
    make("div", { class: "row" },
      needsAdmin && make("button", { type: "button", class: "main", onclick: askAgain }, "Enter an admin key"),
      button("again", "Try again", load, { isShort: false })));
}

async function changeKey() {
  const key = await askForKey("The key that this page sends from now on.");
  if (key) api.key = key;
}

/** Adds the views that this server has, and opens the one that the address names. */
async function start() {
  let info = null;
  try {
    info = await api.json("live/info", { isQuiet: true });
  } catch { /* The live view asks again when it is opened, and says what is wrong. */ }
  if (info?.mode === "replay") {
    addView("replay", "Replay", (panel) => liveView(panel, info));
    document.querySelector('.top a[href="docs"]').hidden = true;
  } else {
    addView("chat", "Chat", (panel) => mountChat(panel, { api }));
    addView("live", "Live", (panel) => liveView(panel, info));
    const keyButton = document.getElementById("key-button");
    keyButton.hidden = false;
    keyButton.addEventListener("click", changeKey);
  }
  const wanted = location.hash.slice(1);
  show(views.has(wanted) ? wanted : views.keys().next().value);
}

window.addEventListener("hashchange", () => {
  const wanted = location.hash.slice(1);
  if (views.has(wanted)) show(wanted);
  else history.replaceState(null, "", "#" + open); // `#views`, the target of the link that skips the header, is no view
});

start();

// The chat: which conversation is open, which answers arrive, and what the buttons do.

import { ApiError } from "./api.js";
import { asCurl, asPython } from "./chat_copy.js";
import { fieldsOf } from "./chat_fields.js";
import { ConversationList } from "./chat_list.js";
import { MessageList } from "./chat_messages.js";
import { applyChunk, explained } from "./chat_stream.js";
import { ConversationStore } from "./chat_store.js";
import { addNode, bodyOf, choose, newAnswer, newConversation, openCalls, path, removeNode, settled } from "./chat_tree.js";
import { Panes } from "./chat_panes.js";
import { SettingsPanel } from "./chat_settings.js";
import { announce, button, copy, growing, icon, make, toast } from "./dom.js";

/** The conversation that a reload of this tab opens again. */
const OPEN = "weft.conversation";
const SAVE_PAUSE = 1000;
const SUGGESTIONS = ["What is the capital of Japan?", "Write a Python function that reverses a list.", "Compare bread and rice in a table."];

export function mountChat(root, { api }) {
  return new Chat(root, api);
}

class Chat {
  constructor(root, api) {
    this._api = api;
    this._conversation = newConversation();
    this._runs = new Map(); // id of a conversation -> {conversation, control, nodes, savedAt, isDue}
    this._deleted = new Set();
    this._store = new ConversationStore({ onChange: () => this._showList(),
      onDelete: (title) => toast(`The oldest chat was deleted, because there is no more room: ${title}`) });
    this._build(root);
    const wanted = sessionStorage.getItem(OPEN);
    this._showConversation();
    if (wanted) this._reopen(wanted);
    addEventListener("pagehide", () => { for (const { conversation } of this._runs.values()) this._save(conversation); });
    if (document.activeElement === document.body && !this._panes.isNarrow) this._input.focus();
  }

  _build(root) {
    this._list = new ConversationList({ open: (id) => this._open(id), create: () => this._create(), rename: (id, title) => this._rename(id, title),
      remove: (id) => this._remove(id) });
    this._settings = new SettingsPanel({ onChange: () => this._settingsChanged(),
      load: async () => fieldsOf(await this._api.json("openapi.json")) });
    this._column = make("div", { class: "column" });
    this._welcome = make("div", { class: "welcome" }, make("h1", {}, "Ask the model"), make("div", { class: "row" },
      SUGGESTIONS.map((text) => make("button", { type: "button", class: "suggestion", onclick: () => this._ask(text) }, text))));
    this._log = make("section", { class: "log", tabindex: "0", "aria-label": "Messages", onscroll: () => this._scrolled() }, this._welcome, this._column);
    this._messages = new MessageList(this._column, {
      editQuestion: (node, text) => this._ask(text, node.parent),
      askAgain: (node) => this._askAgain(node),
      choose: (node, name) => this._choose(node, name),
      giveResults: (node, results) => this._giveResults(node, results),
      copyAs: (kind, node, from) => this._copyAs(kind, node, from),
    });
    this._newest = button("down", "Go to the newest message", () => this._scrollToNewest(), { class: "icon-button newest", hidden: true });
    this._input = growing({ id: "message", rows: "1", placeholder: "Ask something", onkeydown: (event) => this._key(event) });
    this._send = make("button", { type: "submit", class: "main send", onclick: (event) => {
      if (event.detail > 1) event.preventDefault(); // the second click of a double click would stop the answer
    } });
    const form = make("form", { class: "composer", onsubmit: (event) => this._submit(event) },
      make("label", { for: "message", class: "unseen" }, "Message"), this._input, this._send);
    this._title = make("span", { class: "chat-title" });
    this._settingsCount = make("span", { class: "count" });
    this._panes = new Panes({
      left: { element: this._list.element, label: "Conversations" },
      main: make("div", { class: "chat-main" }, this._log, make("div", { class: "dock" }, this._newest, form,
        make("p", { class: "hint" }, "Enter sends, Shift+Enter begins a new line."))),
      right: { element: this._settings.element, label: "Settings" },
      bar: (leftButton, rightButton) => make("div", { class: "chat-bar" }, leftButton, this._title, make("span", { class: "grow" }),
        button("plus", "New chat", () => this._create(), { class: "icon-button bar-new" }), this._settingsCount, rightButton),
    });
    root.append(this._panes.element);
  }

  // --- conversations ---

  /** Shows the conversation that was open before a reload, unless the user has begun another one while it was read. */
  async _reopen(id) {
    const found = await this._read(id);
    if (!found || path(this._conversation).length) return;
    this._conversation = found;
    this._showConversation();
  }

  /** The conversation with this id, from its running answer or from the store. Null: there is none. */
  async _read(id) {
    const running = this._runs.get(id);
    if (running) return running.conversation;
    const found = await this._store.read(id);
    return found && settled(found);
  }

  async _open(id) {
    const found = id === this._conversation.id ? this._conversation : await this._read(id);
    if (!found) return this._showList();
    this._conversation = found;
    this._panes.closeIfNarrow();
    this._showConversation();
    this._input.focus();
  }

  _create() {
    this._conversation = newConversation(this._conversation.settings);
    this._panes.closeIfNarrow();
    this._showConversation();
    this._input.focus();
  }

  async _rename(id, title) {
    const found = id === this._conversation.id ? this._conversation : await this._read(id);
    if (found && found.title !== title) {
      found.title = title;
      await this._save(found);
      this._showTitle();
    }
    await this._showList();
  }

  async _remove(id) {
    const found = id === this._conversation.id ? this._conversation : await this._read(id);
    if (!found) return this._showList();
    this._runs.get(id)?.control.abort();
    this._deleted.add(id);
    await this._store.delete(id);
    if (id === this._conversation.id) this._create();
    else this._showList();
    const undo = async () => {
      this._deleted.delete(id);
      await this._save(found);
      this._open(id);
    };
    toast(`Deleted: ${found.title}`, { text: "Undo", run: undo });
  }

  /** Saves a conversation, unless it is empty or deleted. */
  async _save(conversation) {
    if (this._deleted.has(conversation.id) || !path(conversation).length) return;
    try {
      await this._store.write(conversation);
    } catch (error) {
      if (!this._saidFull) toast(`The browser did not keep the chat: ${error.message}`);
      this._saidFull = true;
    }
    this._showList();
  }

  async _showList() {
    const titles = await this._store.list();
    this._list.show(titles, { openId: this._conversation.id, runningIds: new Set(this._runs.keys()), isLasting: await this._store.isLasting() });
  }

  _showConversation() {
    sessionStorage.setItem(OPEN, this._conversation.id);
    this._settings.show(this._conversation.settings);
    this._showCount();
    this._showMessages();
    this._showList();
    this._scrollToNewest();
  }

  _showMessages() {
    this._messages.show(this._conversation);
    this._welcome.hidden = this._column.childElementCount > 0;
    this._showTitle();
    this._showSend();
  }

  _showTitle() {
    this._title.textContent = this._conversation.title || "New chat";
  }

  /** Saves changed settings after a pause, because each key changes them. */
  _settingsChanged() {
    this._showCount();
    clearTimeout(this._settingsTimer);
    const { _conversation: conversation } = this;
    this._settingsTimer = setTimeout(() => this._save(conversation), SAVE_PAUSE);
  }

  _showCount() {
    const { numSet } = this._settings;
    this._settingsCount.textContent = numSet ? `${numSet} set` : "";
  }

  // --- asking ---

  _key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this._submit(event);
    else if (event.key === "Escape" && this._run) this._stop();
  }

  /** Sends the typed text. While an answer arrives, the same button stops it. */
  _submit(event) {
    event.preventDefault();
    if (this._run) {
      if (event.type === "submit") this._stop();
      return;
    }
    const text = this._input.value;
    if (!text.trim()) return this._input.focus();
    const last = path(this._conversation).at(-1);
    if (last && last.role === "assistant" && openCalls(last).length) {
      toast("The model waits for the result of its call. Type the result first, or make the answer again.");
      return;
    }
    this._ask(text, last?.id ?? null, () => {
      this._input.value = "";
      this._input.dispatchEvent(new Event("input"));
    });
  }

  /** Asks a question below `parent`. `onAsked` runs if the settings are valid. */
  async _ask(text, parent = null, onAsked = () => {}) {
    await this._settings.ready;
    if (!this._validRequest()) return;
    onAsked();
    this._stop();
    await this._answer(addNode(this._conversation, parent, { role: "user", text }));
  }

  /** Asks for another version of an answer. The new version replaces an answer that failed without content. */
  async _askAgain(node) {
    await this._settings.ready;
    if (!this._validRequest()) return;
    this._stop();
    const conversation = this._conversation;
    const parent = conversation.nodes[node.parent];
    if (node.state === "failed" && !node.text && !node.thoughts && !node.calls.length) removeNode(conversation, node);
    await this._answer(parent);
  }

  async _giveResults(node, results) {
    await this._settings.ready;
    if (this._validRequest()) await this._answer(addNode(this._conversation, node.id, { role: "tool", results }));
  }

  /** The fields of the request. Null: a setting is wrong, and its field gets the focus. */
  _validRequest() {
    const request = this._settings.request();
    if (!request) {
      this._panes.open("right");
      this._settings.focusProblem();
    }
    return request;
  }

  get _run() {
    return this._runs.get(this._conversation.id);
  }

  _stop() {
    this._run?.control.abort();
    this._runs.delete(this._conversation.id);
  }

  /** Gets an answer to the conversation up to `parent`. Until it is complete, the user can open other conversations. */
  async _answer(parent) {
    const conversation = this._conversation;
    const request = this._validRequest();
    if (!request) return this._showMessages();
    const { system } = conversation.settings;
    const first = addNode(conversation, parent.id, newAnswer(request, system));
    const run = { conversation, control: new AbortController(), nodes: [first], savedAt: performance.now(), isDue: false };
    this._runs.set(conversation.id, run);
    this._showMessages();
    this._scrollToNewest();
    // The element that had the focus may be gone, such as the field of an edited question.
    if (document.activeElement === document.body) this._input.focus();
    announce("The model answers.");
    await this._save(conversation);
    const problem = await this._receive(run);
    for (const node of run.nodes.filter((one) => one?.state === "running")) {
      node.state = problem ? (problem.name === "AbortError" ? "stopped" : "failed") : "done";
      node.error = node.state === "failed" ? explained(problem) : null;
    }
    if (this._runs.get(conversation.id) === run) this._runs.delete(conversation.id);
    if (conversation === this._conversation) this._showMessages();
    this._growMessages(run);
    announce(first.error ? "" : first.text.length < 500 ? first.text : "The answer is complete.");
    // The number of tokens is at the end of the stream, which did not arrive.
    if (problem) await this._countTokens(run);
    await this._save(conversation);
  }

  /** Reads the stream into the nodes of the run. Returns the error that ended it, or null. */
  async _receive(run) {
    const { conversation, nodes, control } = run;
    const [first] = nodes;
    const body = { ...bodyOf(conversation, first), stream: true, stream_options: { include_usage: true } };
    const onSend = () => { first.times.sent = performance.now(); };
    // With n > 1, the other answers are made at their first chunk. The first answer stays the one that is shown.
    const answerAt = (index) => {
      if (!nodes[index]) {
        nodes[index] = addNode(conversation, first.parent, newAnswer(first.request, first.system));
        nodes[index].times.sent = first.times.sent;
        choose(conversation, first);
      }
      return nodes[index];
    };
    try {
      for await (const { data } of this._api.events("v1/chat/completions", { method: "POST", body, signal: control.signal, onSend })) {
        if (data === "[DONE]") return null;
        applyChunk(JSON.parse(data), nodes, answerAt, performance.now());
        this._changed(run);
      }
      return new ApiError("The connection ended before the answer was complete.");
    } catch (error) {
      return error;
    }
  }

  /** Draws at most once for each animation frame, however many tokens arrived. */
  _changed(run) {
    const now = performance.now();
    if (now - run.savedAt > SAVE_PAUSE) {
      run.savedAt = now;
      this._save(run.conversation);
    }
    if (run.isDue) return;
    run.isDue = true;
    requestAnimationFrame(() => {
      run.isDue = false;
      this._growMessages(run);
    });
  }

  _growMessages(run) {
    if (run.conversation !== this._conversation) return;
    for (const node of run.nodes) if (node) this._messages.grow(node);
    if (this._isFollowing) this._log.scrollTop = this._log.scrollHeight;
  }

  /** The server reports the number of tokens at the end of a stream. An answer without it is tokenised again to count them. */
  async _countTokens(run) {
    for (const node of run.nodes) {
      if (!node || node.usage || node.times.first === undefined) continue;
      try {
        const prompt = node.thoughts + node.text;
        const { count } = await this._api.json("tokenize", { method: "POST", body: { prompt, add_special_tokens: false }, isQuiet: true });
        node.countedTokens = count;
        this._messages.grow(node);
      } catch { /* The figures of this answer stay without a number of tokens. */ }
    }
  }

  // --- the rest ---

  _showSend() {
    const isRunning = Boolean(this._run);
    const [name, text] = isRunning ? ["stop", "Stop"] : ["send", "Send"];
    if (this._send.title === text) return;
    this._send.title = text;
    this._send.setAttribute("aria-label", text);
    this._send.replaceChildren(icon(name));
  }

  /** Shows another version of a message. Its buttons are new elements, so the button that was pressed gets the focus again. */
  _choose(node, buttonName) {
    choose(this._conversation, node);
    this._showMessages();
    const shown = this._column.querySelectorAll(".message");
    shown[path(this._conversation).indexOf(node)]?.querySelector(`[aria-label="${buttonName}"]`)?.focus();
    this._save(this._conversation);
  }

  _copyAs(kind, node, from) {
    const base = new URL("./", location.href.split("#")[0]).href;
    const write = kind === "curl" ? asCurl : asPython;
    copy(write(base, bodyOf(this._conversation, node), Boolean(this._api.key), node.model ?? "default"), from);
    toast(kind === "curl" ? "The curl command is copied." : "The Python program is copied.");
  }

  /** The view follows new text only while its end is visible. */
  _scrolled() {
    this._isFollowing = this._log.scrollHeight - this._log.scrollTop - this._log.clientHeight < 40;
    this._newest.hidden = this._isFollowing;
  }

  _scrollToNewest() {
    this._isFollowing = true;
    this._log.scrollTop = this._log.scrollHeight;
    this._newest.hidden = true;
  }
}

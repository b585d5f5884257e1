// A conversation: a tree of messages, because a question can be edited and an answer made again. Plain data for the store.
//
// node: {id, parent, role: "user" | "assistant" | "tool", ...}
//   user       text
//   assistant  text, thoughts, calls [{id, type, name, text}], tokens, state: "running" | "done" | "stopped" | "failed",
//              finish, error, usage, times, request (its fields besides messages), system
//   tool       results [{id, text}]

const MAX_TITLE = 60;
export const EMPTY_SETTINGS = { system: "", values: {}, form: "text", schema: "", tools: "" };

export function newConversation(settings = EMPTY_SETTINGS) {
  return { id: newId(), title: "", updated: Date.now(), settings: structuredClone(settings), nodes: {}, chosen: {}, next: 1 };
}

/** `crypto.randomUUID` exists on secure origins only, and a server may be used over plain HTTP. */
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Adds a message below `parent` (null: at the top) and shows it. */
export function addNode(conversation, parent, node) {
  const id = conversation.next;
  conversation.next += 1;
  const added = { ...node, id, parent };
  conversation.nodes[id] = added;
  choose(conversation, added);
  conversation.updated = Date.now();
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.text);
  return added;
}

export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > MAX_TITLE ? line.slice(0, MAX_TITLE - 1).trimEnd() + "…" : line;
}

export function newAnswer(request, system) {
  return { role: "assistant", text: "", thoughts: "", calls: [], tokens: null, state: "running", finish: null, error: null, usage: null,
    times: {}, request, system };
}

/** Makes this message the one that is shown among its versions. */
export function choose(conversation, node) {
  conversation.chosen[node.parent ?? "top"] = node.id;
}

/** The versions of a message, oldest first. */
export function versions(conversation, node) {
  return Object.values(conversation.nodes).filter((one) => one.parent === node.parent && one.role === node.role)
    .sort((one, other) => one.id - other.id);
}

/** Removes an answer. The caller makes sure that there are no messages below it. */
export function removeNode(conversation, node) {
  delete conversation.nodes[node.id];
  const [last] = versions(conversation, node).slice(-1);
  if (last) choose(conversation, last);
  else delete conversation.chosen[node.parent ?? "top"];
}

/** The messages that are shown, oldest first. */
export function path(conversation) {
  const found = [];
  let id = conversation.chosen.top;
  while (id !== undefined && conversation.nodes[id]) {
    found.push(conversation.nodes[id]);
    id = conversation.chosen[id];
  }
  return found;
}

/** The messages from the first one to `node`. */
function pathTo(conversation, node) {
  const found = [];
  for (let one = node; one; one = conversation.nodes[one.parent]) found.unshift(one);
  return found;
}

/** The calls of an answer that can get results: none if the answer was cut off, because a call may be incomplete. */
export function openCalls(node) {
  return node.state === "done" ? node.calls : [];
}

/** The messages of the request that `answer` is the answer to. */
export function messagesOf(conversation, answer) {
  const messages = answer.system.trim() ? [{ role: "system", content: answer.system }] : [];
  for (const node of pathTo(conversation, conversation.nodes[answer.parent])) {
    if (node.role === "user") messages.push({ role: "user", content: node.text });
    else if (node.role === "tool") {
      messages.push(...node.results.map(({ id, text }) => ({ role: "tool", tool_call_id: id, content: text })));
    } else if (node.text || openCalls(node).length) messages.push(assistantMessage(node));
  }
  return messages;
}

/** An answer as a message of a request. */
function assistantMessage(node) {
  const calls = openCalls(node).map(({ id, type, name, text }) =>
    (type === "custom" ? { id, type, custom: { name, input: text } } : { id, type: "function", function: { name, arguments: text } }));
  return {
    role: "assistant",
    content: node.text || (calls.length ? null : ""),
    ...(node.thoughts ? { reasoning_content: node.thoughts } : {}),
    ...(calls.length ? { tool_calls: calls } : {}),
  };
}

/** The body of the request that `answer` is the answer to. */
export function bodyOf(conversation, answer) {
  return { messages: messagesOf(conversation, answer), ...answer.request };
}

/** Marks running answers as stopped, because a reload has ended their streams. Returns the conversation. */
export function settled(conversation) {
  for (const node of Object.values(conversation.nodes)) {
    if (node.state === "running") node.state = "stopped";
  }
  return conversation;
}

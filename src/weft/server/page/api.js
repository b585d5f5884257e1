// Requests to the server: the API key, errors, and streams of server-sent events.

const KEY = "weft.key";

/** A failed request, with a message for the user. `status` is 0 unless the server answered with an error status. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    /** Seconds that the server asks to wait before the next attempt. Null: it gave none. */
    this.retryAfter = retryAfter;
  }
}

export class Api {
  /** `askForKey(message)`: shows the message and resolves to a key, or to null if the user gives none. */
  constructor(askForKey) {
    this._askForKey = askForKey;
    this._asking = null;
  }

  /** The browser keeps the key for this tab, and deletes it with the tab. */
  get key() {
    return sessionStorage.getItem(KEY) || "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  /** Sends a request. Asks for a key when the server wants one. Throws an ApiError for every other error.
   *  With `isQuiet`, a missing key is an error too. `onSend()` is called before each attempt. */
  async request(path, { method = "GET", body, signal, isQuiet = false, onSend = null } = {}) {
    for (;;) {
      const headers = {};
      const key = this.key;
      if (key) headers.Authorization = "Bearer " + key;
      if (body !== undefined) headers["Content-Type"] = "application/json";
      let response;
      try {
        const content = body === undefined ? undefined : JSON.stringify(body);
        onSend?.();
        response = await fetch(path, { method, headers, signal, body: content });
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The server does not answer. Is it running?");
      }
      if (response.ok) return response;
      const error = await errorOf(response);
      if (response.status !== 401 || isQuiet) throw error;
      if (key === this.key && !(await this._askOnce(error.message, key))) throw error;
    }
  }

  /** Asks for the key. Requests that need it at the same time share one dialog. Returns whether the user gave a key. */
  async _askOnce(message, refused) {
    const words = refused ? "The server does not accept this API key." : "This server needs an API key.";
    this._asking ??= this._askForKey(words).finally(() => { this._asking = null; });
    const key = await this._asking;
    if (key) this.key = key;
    return Boolean(key);
  }

  async json(path, options) {
    return (await this.request(path, options)).json();
  }

  /** The events of a stream, each as {event, data}. `data` is text. */
  async *events(path, options) {
    const response = await this.request(path, options);
    yield* eventsOf(response);
  }
}

/** The error in a response. Servers send it as an object or as text. */
async function errorOf(response) {
  let found = {};
  try {
    const content = await response.json();
    found = typeof content.error === "object" ? content.error : { message: content.error };
  } catch { /* not JSON: the message below has only the status */ }
  const seconds = Number(response.headers.get("retry-after"));
  return new ApiError(found.message || `The server answered with the status ${response.status}.`, {
    status: response.status,
    code: found.code || null,
    retryAfter: response.headers.has("retry-after") && Number.isFinite(seconds) ? seconds : null,
  });
}

/** Yields the events of a stream. If the caller stops early, the connection is closed. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection to the server broke.");
      }
      if (piece.done) return;
      const blocks = (rest + piece.value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parseEvent(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** One event of a stream. Null if it has no data, like a comment. */
function parseEvent(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line.startsWith("event:")) name = line.slice(6).trim();
  }
  return data.length ? { event: name, data: data.join("\n") } : null;
}

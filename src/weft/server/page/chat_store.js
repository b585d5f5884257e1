// Keeps conversations in this browser (IndexedDB), up to `LIMITS`. Then the oldest ones are deleted.
// Where the browser has no storage, they last as long as the page.

const NAME = "weft";
export const LIMITS = { conversations: 200, characters: 20_000_000 };
const CONVERSATIONS = "conversations";
/** What the list shows, so that it need not read every conversation: {id, title, updated, characters}. */
const TITLES = "titles";

export class ConversationStore {
  /** `onChange()` is called when another tab changed a conversation; `onDelete(title)` when one is deleted to
   *  make room. */
  constructor({ onChange, onDelete, limits = LIMITS }) {
    this._limits = limits;
    this._onDelete = onDelete;
    this._memory = new Map();
    this._database = opened().catch(() => null);
    this._ready = null;
    this._database.then((database) => { this._ready = database; });
    this._channel = new BroadcastChannel("weft.conversations");
    this._channel.addEventListener("message", onChange);
  }

  async isLasting() {
    return Boolean(await this._database);
  }

  /** The conversations, newest first, as {id, title, updated}. */
  async list() {
    const titles = await this._read((stores) => stores[TITLES].getAll(), () => [...this._memory.values()].map(titleOf));
    return titles.sort((one, other) => other.updated - one.updated);
  }

  /** The conversation, or null if it does not exist. */
  async read(id) {
    return (await this._read((stores) => stores[CONVERSATIONS].get(id), () => structuredClone(this._memory.get(id)))) ?? null;
  }

  async write(conversation) {
    const title = titleOf(conversation);
    await this._write((stores) => {
      stores[CONVERSATIONS].put(conversation);
      stores[TITLES].put(title);
    }, () => this._memory.set(conversation.id, structuredClone(conversation)));
    await this._makeRoom(conversation.id);
  }

  async delete(id) {
    await this._write((stores) => {
      stores[CONVERSATIONS].delete(id);
      stores[TITLES].delete(id);
    }, () => this._memory.delete(id));
  }

  /** Deletes the oldest conversations beyond the limits, except `keptId`. */
  async _makeRoom(keptId) {
    let characters = 0;
    let count = 0;
    for (const title of await this.list()) {
      characters += title.characters;
      count += 1;
      const isTooMuch = count > this._limits.conversations || characters > this._limits.characters;
      if (!isTooMuch || title.id === keptId) continue;
      characters -= title.characters;
      count -= 1;
      await this.delete(title.id);
      this._onDelete(title.title);
    }
  }

  async _read(fromDatabase, fromMemory) {
    const database = await this._database;
    return database ? done(fromDatabase(storesOf(database, "readonly"))) : fromMemory();
  }

  /** Runs `toDatabase` in one transaction. Without a database, runs `toMemory`. */
  async _write(toDatabase, toMemory) {
    // Writes at once if possible, and commits explicitly: the page may be closed before its next task.
    const database = this._ready ?? await this._database;
    if (database) {
      const stores = storesOf(database, "readwrite");
      const { transaction } = stores[TITLES];
      toDatabase(stores);
      transaction.commit();
      await committed(transaction);
      this._channel.postMessage("changed");
    } else toMemory();
  }
}

function titleOf(conversation) {
  const { id, title, updated } = conversation;
  return { id, title, updated, characters: JSON.stringify(conversation).length };
}

function opened() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => {
    for (const name of [CONVERSATIONS, TITLES]) request.result.createObjectStore(name, { keyPath: "id" });
  };
  return done(request);
}

function storesOf(database, mode) {
  const transaction = database.transaction([CONVERSATIONS, TITLES], mode);
  return Object.fromEntries([CONVERSATIONS, TITLES].map((name) => [name, transaction.objectStore(name)]));
}

/** Resolves to the result of a request to IndexedDB. */
function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function committed(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}

// Parses Markdown while it arrives. Each complete line is parsed once, and extends the elements of the lines before it. Only
// the paragraph, heading or table row that still grows is made again. The result does not depend on how the text was split.
//
// The incomplete last line is a draft: its changes are written into a journal, and undone before more text is added.
// Differences from CommonMark: indented lines are no code, `---` under a line is a rule, a new line is a break, and a
// list may be nested with two spaces. Models write all of these.

import { inline } from "./chat_inline.js";
import { button, copy, make } from "./dom.js";

/** Maximum depth of quotes and lists inside each other. Deeper ones are shown as text. */
const MAX_DEPTH = 12;
/** A longer paragraph is parsed in parts, so that its growth stays cheap. */
const MAX_PARAGRAPH = 8_000;
const MAX_CELLS = 100;

export class MarkdownView {
  constructor(root) {
    this._page = new Page();
    this._top = new Blocks(root, this._page, 0);
    this._pending = "";
  }

  /** Adds text at the end. */
  add(text) {
    this._page.undoDraft();
    const lines = (this._pending + text).split("\n");
    this._pending = lines.pop();
    for (const line of lines) this._top.line(withoutReturn(line));
    if (this._pending) this._page.draft(() => this._top.line(withoutReturn(this._pending)));
    this._page.render();
  }

  /** Call when no more text follows: the last line is complete. */
  end() {
    this._page.undoDraft();
    if (this._pending) this._top.line(withoutReturn(this._pending));
    this._pending = "";
    this._page.render();
  }
}

function withoutReturn(line) {
  return line.endsWith("\r") ? line.slice(0, -1) : line;
}

/** Changes elements and state, and remembers how to undo the changes of a draft. */
class Page {
  constructor() {
    this.isDraft = false;
    this._journal = [];
    this._leaves = new Set(); // leaves with text that changed since the last render
  }

  /** Runs `change`. `undoDraft` can undo its effects. */
  draft(change) {
    this.isDraft = true;
    change();
    this.isDraft = false;
  }

  undoDraft() {
    while (this._journal.length) this._journal.pop()();
  }

  set(object, name, value) {
    const before = object[name];
    object[name] = value;
    this._note(() => { object[name] = before; });
  }

  append(parent, child) {
    parent.append(child);
    this._note(() => child.remove());
  }

  remove(child) {
    const { parentNode, nextSibling } = child;
    child.remove();
    this._note(() => parentNode.insertBefore(child, nextSibling));
  }

  appendText(node, text) {
    const { length } = node;
    node.appendData(text);
    this._note(() => node.deleteData(length, node.length - length));
  }

  setText(leaf, text) {
    const before = leaf.text;
    leaf.text = text;
    this._leaves.add(leaf);
    this._note(() => {
      leaf.text = before;
      this._leaves.add(leaf);
    });
  }

  render() {
    for (const leaf of this._leaves) leaf.render();
    this._leaves.clear();
  }

  _note(undo) {
    if (this.isDraft) this._journal.push(undo);
  }
}

/** An element with inline text. */
class Leaf {
  constructor(element) {
    this.element = element;
    this.text = "";
    this._done = 0; // characters in parts that are final
    this._numDone = 0; // nodes of these parts
  }

  render() {
    if (this.text.length < this._done) this._done = this._numDone = 0;
    while (this.element.childNodes.length > this._numDone) this.element.lastChild.remove();
    while (this.text.length - this._done > MAX_PARAGRAPH) {
      const space = this.text.lastIndexOf(" ", this._done + MAX_PARAGRAPH);
      const end = space > this._done ? space : this._done + MAX_PARAGRAPH;
      this.element.append(...inline(this.text.slice(this._done, end)));
      this._done = end;
      this._numDone = this.element.childNodes.length;
    }
    this.element.append(...inline(this.text.slice(this._done)));
  }
}

// --- lines ---

function indentation(line) {
  let columns = 0;
  for (const char of line) {
    if (char === " ") columns += 1;
    else if (char === "\t") columns += 4;
    else break;
  }
  return columns;
}

/** Removes at most `columns` columns of white space at the start. */
function strip(line, columns) {
  let at = 0;
  let left = columns;
  while (left > 0 && (line[at] === " " || line[at] === "\t")) {
    left -= line[at] === "\t" ? 4 : 1;
    at += 1;
  }
  return " ".repeat(Math.max(0, -left)) + line.slice(at);
}

function isRule(line) {
  const marks = line.replace(/[ \t]/g, "");
  return marks.length >= 3 && /^(?:-+|\*+|_+)$/.test(marks);
}

function heading(line) {
  const found = /^\s*(#{1,6})(?=\s|$)/.exec(line);
  if (!found) return null;
  return { level: found[1].length, text: line.slice(found[0].length).trim().replace(/(^|\s)#+$/, "") };
}

function fence(line) {
  const found = /^\s*(`{3,}|~{3,})\s*(.*)$/.exec(line);
  if (!found || (found[1][0] === "`" && found[2].includes("`"))) return null;
  return { marks: found[1], info: found[2].trim(), indent: indentation(line) };
}

/** The marker of a list item at the start of a line, and the text after it. Null: there is none. */
function listMarker(line) {
  const found = /^\s*(?:([-*+])|(\d{1,9})([.)]))(?=\s|$)/.exec(line);
  if (!found || isRule(line)) return null;
  const rest = line.slice(found[0].length);
  const spaces = indentation(rest);
  const padding = rest.trim() && spaces <= 4 ? spaces : 1;
  const indent = indentation(line);
  const width = found[0].trim().length;
  return { isOrdered: Boolean(found[2]), start: Number(found[2] || 0), indent, contentIndent: indent + width + padding,
    text: strip(rest, padding) };
}

/** Whether a line ends the paragraph before it. */
function interrupts(line) {
  if (isRule(line) || heading(line) || fence(line) || /^\s*>/.test(line)) return true;
  const marker = listMarker(line);
  return Boolean(marker && marker.text.trim() && (!marker.isOrdered || marker.start === 1));
}

/** The cells of a row of a table. */
function cellsOf(line) {
  const text = line.trim().replace(/^\|/, "");
  const cells = [""];
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cells[cells.length - 1] += "|";
      at += 1;
    } else if (text[at] === "|") cells.push("");
    else cells[cells.length - 1] += text[at];
  }
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim());
}

/** The alignment of each column, or null if the line is not the one below the head of a table. */
function alignments(line) {
  if (!/^[\s|:-]+$/.test(line) || !line.includes("-") || !line.includes("|")) return null;
  const cells = cellsOf(line);
  if (!cells.every((cell) => /^:?-+:?$/.test(cell))) return null;
  return cells.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
}

// --- blocks ---

/** The blocks inside one element. `open` is the block that the next line may continue. `accept(line)` of a block adds the line,
 *  or returns false if the line does not continue the block. */
class Blocks {
  constructor(element, page, depth) {
    this.element = element;
    this.page = page;
    this.depth = depth;
    this.open = null;
  }

  line(line) {
    if (this.open?.accept(line)) return;
    if (this.open) this.page.set(this, "open", null);
    if (line.trim()) this.page.set(this, "open", this._begin(line));
  }

  get isParagraphOpen() {
    return Boolean(this.open?.isParagraphOpen);
  }

  /** The block that begins with this line. */
  _begin(line) {
    const code = fence(line);
    if (code) return new Code(this, code);
    const title = heading(line);
    if (title) return new Heading(this, title);
    if (isRule(line)) return new Rule(this);
    if (this.depth < MAX_DEPTH) {
      if (/^\s*>/.test(line)) return new Quote(this, line);
      const marker = listMarker(line);
      if (marker) return new List(this, marker);
    }
    return new Paragraph(this, line);
  }
}

class Paragraph {
  constructor(blocks, line) {
    this._blocks = blocks;
    this._leaf = new Leaf(make("p"));
    this._table = null;
    blocks.page.append(blocks.element, this._leaf.element);
    blocks.page.setText(this._leaf, line.trim());
  }

  get isParagraphOpen() {
    return !this._table;
  }

  accept(line) {
    if (this._table) return this._table.accept(line);
    if (!line.trim()) return false;
    const aligned = alignments(line);
    if (aligned && this._beginTable(aligned)) return true;
    // A draft that may become the line below the head of a table is not shown yet.
    if (this._blocks.page.isDraft && /^\s*\|[\s|:-]*$/.test(line)) return true;
    if (interrupts(line)) return false;
    this._blocks.page.setText(this._leaf, `${this._leaf.text}\n${line.trim()}`);
    return true;
  }

  /** Makes the last line of the paragraph the head of a table, if it has one cell for each of `aligned`. Returns whether it did. */
  _beginTable(aligned) {
    const { page, element } = this._blocks;
    const { text } = this._leaf;
    const start = text.lastIndexOf("\n") + 1;
    const head = cellsOf(text.slice(start));
    if (head.length !== aligned.length || head.length > MAX_CELLS || !text.slice(start).includes("|")) return false;
    if (start) page.setText(this._leaf, text.slice(0, start - 1));
    else page.remove(this._leaf.element);
    page.set(this, "_table", new Table(page, element, head, aligned));
    return true;
  }
}

class Table {
  constructor(page, element, head, aligned) {
    this._page = page;
    this._aligned = aligned;
    this._body = make("tbody");
    page.append(element, make("div", { class: "wide-table", tabindex: "0", role: "group", "aria-label": "Table" },
      make("table", {}, make("thead", {}, this._row("th", head)), this._body)));
  }

  accept(line) {
    if (!line.includes("|") || interrupts(line)) return false;
    this._page.append(this._body, this._row("td", cellsOf(line)));
    return true;
  }

  _row(tag, cells) {
    return make("tr", {}, this._aligned.map((side, index) =>
      make(tag, { class: side === "left" ? null : `to-${side}`, scope: tag === "th" ? "col" : null }, inline(cells[index] ?? ""))));
  }
}

class Heading {
  constructor(blocks, { level, text }) {
    // The page itself uses h1 and h2, so the headings of an answer begin with h3.
    const leaf = new Leaf(make(`h${Math.min(6, level + 2)}`, { class: `level-${level}` }));
    blocks.page.append(blocks.element, leaf.element);
    blocks.page.setText(leaf, text);
  }

  accept() {
    return false;
  }
}

class Rule {
  constructor(blocks) {
    blocks.page.append(blocks.element, make("hr"));
  }

  accept() {
    return false;
  }
}

class Code {
  constructor(blocks, { marks, info, indent }) {
    this._page = blocks.page;
    this._marks = marks;
    this._indent = indent;
    this._isClosed = false;
    this._isEmpty = true;
    this._text = document.createTextNode("");
    const language = info.split(/\s/)[0].slice(0, 40);
    const code = make("pre", { tabindex: "0", "aria-label": language ? `Code: ${language}` : "Code", role: "group" },
      make("code", {}, this._text));
    const copyButton = button("copy", "Copy the code", () => copy(this._text.data, copyButton));
    this._page.append(blocks.element, make("div", { class: "code" },
      make("div", { class: "code-bar" }, make("span", {}, language), copyButton), code));
  }

  accept(line) {
    if (this._isClosed) return false;
    const text = line.trim();
    const isMarks = text !== "" && text === this._marks[0].repeat(text.length);
    if (isMarks && text.length >= this._marks.length) {
      this._page.set(this, "_isClosed", true);
      return true;
    }
    // Marks in a draft are probably the beginning of the closing fence: showing them would make the block flicker.
    if (isMarks && this._page.isDraft) return true;
    this._page.appendText(this._text, (this._isEmpty ? "" : "\n") + strip(line, this._indent));
    this._page.set(this, "_isEmpty", false);
    return true;
  }
}

class Quote {
  constructor(blocks, line) {
    const element = make("blockquote");
    this._inside = new Blocks(element, blocks.page, blocks.depth + 1);
    blocks.page.append(blocks.element, element);
    this.accept(line);
  }

  get isParagraphOpen() {
    return this._inside.isParagraphOpen;
  }

  accept(line) {
    const mark = /^\s*> ?/.exec(line);
    if (mark) this._inside.line(line.slice(mark[0].length));
    else if (line.trim() && this.isParagraphOpen && !interrupts(line)) this._inside.line(line.trimStart());
    else return false;
    return true;
  }
}

class List {
  constructor(blocks, marker) {
    this._blocks = blocks;
    this._isOrdered = marker.isOrdered;
    this._element = make(marker.isOrdered ? "ol" : "ul", { start: marker.isOrdered && marker.start !== 1 ? marker.start : null });
    this._isAfterBlank = false;
    blocks.page.append(blocks.element, this._element);
    this._beginItem(marker);
  }

  get isParagraphOpen() {
    return this._inside.isParagraphOpen;
  }

  accept(line) {
    const { page } = this._blocks;
    if (!line.trim()) {
      this._inside.line("");
      page.set(this, "_isAfterBlank", true);
      return true;
    }
    const indent = indentation(line);
    const marker = listMarker(line);
    if (indent >= this._contentIndent || (marker && indent >= this._indent + 2)) {
      this._inside.line(strip(line, Math.min(indent, this._contentIndent)));
    } else if (marker && marker.isOrdered === this._isOrdered) {
      this._beginItem(marker);
    } else if (!this._isAfterBlank && this.isParagraphOpen && !interrupts(line)) {
      this._inside.line(line.trimStart());
    } else {
      return false;
    }
    page.set(this, "_isAfterBlank", false);
    return true;
  }

  _beginItem(marker) {
    const { page, depth } = this._blocks;
    const item = make("li");
    page.append(this._element, item);
    page.set(this, "_indent", marker.indent);
    page.set(this, "_contentIndent", marker.contentIndent);
    page.set(this, "_inside", new Blocks(item, page, depth + 1));
    this._inside.line(marker.text.replace(/^\[ \](?=\s)/, "☐").replace(/^\[[xX]\](?=\s)/, "☑"));
  }
}

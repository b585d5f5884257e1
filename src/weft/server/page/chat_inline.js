// Markdown inside a line: emphasis, code, links, breaks. Makes elements and text nodes; no text is parsed as HTML.
// Links lead to http and https only. Everything else stays plain text.

import { make } from "./dom.js";

/** Longer text is not parsed: the time to find pairs of marks grows with the square of its length. */
const MAX_CHARACTERS = 20_000;
const SPECIAL = /[\\`*_~[\]!<\n]|https?:\/\//g;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const AUTOLINK = /<(https?:\/\/[^\s<>]{1,2000})>/y;
const BREAK = /<br ?\/?>/iy;
const BARE_LINK = /https?:\/\/[^\s<>"`]{1,2000}/y;
/** What follows the closing bracket of a link: an address with at most one level of parentheses, and perhaps a title. */
const TARGET = /\( *(?:<([^<>\n]{0,2000})>|((?:[^\s()<>\\]|\\.|\([^\s()<>]{0,500}\)){0,2000}))(?: +(?:"[^"\n]{0,500}"|'[^'\n]{0,500}'))? *\)/y;

export function inline(text) {
  if (text.length > MAX_CHARACTERS) return [document.createTextNode(text)];
  return emphasised(scan(text));
}

/** The address if it is one of http or https, else null. */
export function safeAddress(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
}

function link(address, ...children) {
  return make("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

/** Splits text into entries: {node}, a run of marks {char, count, canOpen, canClose}, or an open bracket {bracket, isImage}. */
function scan(text) {
  const entries = [];
  const brackets = [];
  const missing = new Set(); // lengths of backtick runs that have no closing run
  let plainFrom = 0;
  let at = 0;
  const flush = (end) => {
    if (end > plainFrom) entries.push({ node: document.createTextNode(text.slice(plainFrom, end)) });
  };
  const put = (entry, start, end) => {
    flush(start);
    if (entry) entries.push(entry);
    plainFrom = at = end;
  };
  for (;;) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) break;
    const start = found.index;
    const char = text[start];
    at = start + 1;
    if (char === "\\") {
      if (text[at] === "\n") put({ node: make("br") }, start, at + 1);
      else if (at < text.length && PUNCTUATION.test(text[at])) {
        put(null, start, at);
        at += 1; // the character is plain
      }
    } else if (char === "\n") {
      put({ node: make("br") }, start, at);
    } else if (char === "`") {
      const length = runLength(text, start);
      at = start + length;
      const end = missing.has(length) ? -1 : closingTicks(text, at, length);
      if (end < 0) missing.add(length);
      else put({ node: make("code", {}, codeText(text.slice(at, end))) }, start, end + length);
    } else if (char === "*" || char === "_" || char === "~") {
      const count = runLength(text, start);
      put(marks(text, char, start, count), start, start + count);
    } else if (char === "!") {
      if (text[at] === "[") {
        put({ bracket: "![", isImage: true }, start, at + 1);
        brackets.push(entries.length - 1);
      }
    } else if (char === "[") {
      put({ bracket: "[", isImage: false }, start, at);
      brackets.push(entries.length - 1);
    } else if (char === "]") {
      closeBracket(text, start);
    } else if (char === "<") {
      const address = matchAt(AUTOLINK, text, start);
      const safe = address && safeAddress(address[1]);
      const lineBreak = matchAt(BREAK, text, start);
      if (safe && !brackets.length) put({ node: link(safe, address[1]) }, start, start + address[0].length);
      else if (lineBreak) put({ node: make("br") }, start, start + lineBreak[0].length);
    } else if (!/\w/.test(text[start - 1] || "")) {
      const source = trimmedLink(matchAt(BARE_LINK, text, start)?.[0] || "");
      const safe = safeAddress(source);
      if (safe && !brackets.length) put({ node: link(safe, source) }, start, start + source.length);
    }
  }
  flush(text.length);
  return entries;

  /** Makes a link of the entries since the last open bracket, if a target follows. */
  function closeBracket(source, start) {
    const index = brackets.pop();
    if (index === undefined) return;
    const target = matchAt(TARGET, source, start + 1);
    const safe = target && safeAddress((target[1] ?? target[2]).replace(/\\(.)/g, "$1"));
    if (!safe) return;
    flush(start);
    const [open, ...inside] = entries.splice(index);
    // An image becomes a link to the image: the page loads nothing from other hosts.
    const nodes = emphasised(inside);
    const words = nodes.length ? nodes : [open.isImage ? "image" : safe];
    const isInLink = open.isImage && brackets.length > 0;
    entries.push({ node: isInLink ? make("span", {}, ...words) : link(safe, ...words) });
    plainFrom = at = start + 1 + target[0].length;
    if (!open.isImage) brackets.length = 0; // no links inside links
  }
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function runLength(text, start) {
  let end = start + 1;
  while (text[end] === text[start]) end += 1;
  return end - start;
}

/** The position of the next run of exactly `length` backticks, or -1. */
function closingTicks(text, from, length) {
  for (let at = text.indexOf("`", from); at >= 0; at = text.indexOf("`", at)) {
    const found = runLength(text, at);
    if (found === length) return at;
    at += found;
  }
  return -1;
}

/** The text of inline code: line breaks become spaces, and a space at both ends is removed. */
function codeText(text) {
  const line = text.replace(/\n/g, " ");
  return line.startsWith(" ") && line.endsWith(" ") && line.trim() ? line.slice(1, -1) : line;
}

/** Removes punctuation at the end: it belongs to the sentence, not to the address. */
function trimmedLink(source) {
  let end = source.length;
  for (;;) {
    const last = source[end - 1];
    const opens = last === ")" && source.slice(0, end).split("(").length;
    const isLoose = last === ")" && opens < source.slice(0, end).split(")").length;
    if (!/[.,:;!?'*_~\]]/.test(last || "") && !isLoose) return source.slice(0, end);
    end -= 1;
  }
}

/** Whether a run of marks may begin or end emphasis follows from the characters beside it, as in CommonMark. */
function marks(text, char, start, count) {
  const before = text[start - 1] ?? " ";
  const after = text[start + count] ?? " ";
  const [spaceBefore, spaceAfter] = [/\s/.test(before), /\s/.test(after)];
  const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
  const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
  const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
  const isWord = char === "_";
  const isUsable = char !== "~" || count === 2;
  return {
    char, count, length: count,
    canOpen: isUsable && left && (!isWord || !right || markBefore),
    canClose: isUsable && right && (!isWord || !left || markAfter),
  };
}

/** The nodes of entries. A pair of marks becomes an element; a mark without a partner becomes text. */
function emphasised(entries) {
  const out = [];
  const openers = { "*": 0, "_": 0, "~": 0 };
  for (const entry of entries) {
    while (entry.canClose && entry.count > 0 && openers[entry.char] > 0) {
      let at = out.length - 1;
      while (at >= 0 && !isPartner(out[at], entry)) at -= 1;
      if (at < 0) break;
      const opener = out[at];
      const used = opener.count >= 2 && entry.count >= 2 ? 2 : 1;
      const inside = out.splice(at + 1);
      for (const one of inside) if (one.canOpen) openers[one.char] -= 1;
      const tag = entry.char === "~" ? "del" : used === 2 ? "strong" : "em";
      opener.count -= used;
      entry.count -= used;
      if (!opener.count) {
        out.pop();
        openers[opener.char] -= 1;
      }
      out.push({ node: make(tag, {}, inside.map(nodeOf)) });
    }
    if (entry.char && !entry.count) continue;
    out.push(entry);
    if (entry.canOpen) openers[entry.char] += 1;
  }
  return out.map(nodeOf);
}

/** Whether these two runs of marks may begin and end the same emphasis. */
function isPartner(opener, closer) {
  if (opener.char !== closer.char || !opener.canOpen || !opener.count) return false;
  // CommonMark's rule of three: if a run can open and close, the sum of both lengths is no multiple of 3, or each length is one.
  const isBoth = opener.canClose || closer.canOpen;
  return !isBoth || (opener.length + closer.length) % 3 !== 0 || (opener.length % 3 === 0 && closer.length % 3 === 0);
}

function nodeOf(entry) {
  if (entry.node) return entry.node;
  return document.createTextNode(entry.bracket ?? entry.char.repeat(entry.count));
}

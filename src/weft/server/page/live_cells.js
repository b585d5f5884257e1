// The states of the KV blocks, and their map with a bounded number of cells. Nothing here draws.

/** The letters of the states, as the server sends them. "": not known yet. States of store blocks are upper case. */
export const STATES = ["", "f", "u", "s", "c", "h", "i", "U", "S", "C", "H", "I", "F"];
const CODES = new Map(STATES.map((letter, code) => [letter, code]));
const FREE = [CODES.get(""), CODES.get("f"), CODES.get("F")];

export class BlockStates {
  constructor(numBlocks) {
    /** codes[block] is the index of its state in `STATES`. */
    this.codes = new Uint8Array(numBlocks);
    /** counts[code] is the number of blocks in the state `STATES[code]`. */
    this.counts = new Array(STATES.length).fill(0);
    this.counts[0] = numBlocks;
  }

  /** Sets the states of the blocks from `first` on. */
  write(first, letters) {
    const end = Math.min(first + letters.length, this.codes.length);
    for (let block = first; block < end; block++) {
      const code = CODES.get(letters[block - first]) || 0;
      const before = this.codes[block];
      if (code === before) continue;
      this.counts[before]--;
      this.counts[code]++;
      this.codes[block] = code;
    }
  }

  count(letter) {
    return this.counts[CODES.get(letter)];
  }

  /** Counts the blocks from `first` to before `end` by state: a Map from the letter of a state to a number. */
  countWithin(first, end) {
    const counts = new Map();
    for (let block = first; block < Math.min(end, this.codes.length); block++) {
      const letter = STATES[this.codes[block]];
      counts.set(letter, (counts.get(letter) || 0) + 1);
    }
    return counts;
  }
}

/** The grid for `numBlocks` blocks in `width` x `height` pixels: {size, columns, rows, perCell}. `size` is the side of a
 *  cell with its gap. A cell stands for several blocks if even the smallest cells do not fit. */
export function grid(numBlocks, width, height, { largest = 40, smallest = 4 } = {}) {
  for (let size = largest; size >= smallest; size--) {
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(numBlocks / columns);
    if (rows * size <= height) return { size, columns, rows: Math.max(1, rows), perCell: 1 };
  }
  const columns = Math.max(1, Math.floor(width / smallest));
  const rows = Math.max(1, Math.floor(height / smallest));
  const perCell = Math.ceil(numBlocks / (columns * rows));
  return { size: smallest, columns, rows: Math.ceil(Math.ceil(numBlocks / perCell) / columns), perCell };
}

/** For each cell of `perCell` blocks: the most frequent state that is not free, and the fraction of blocks that are not free. */
export function aggregate(codes, perCell) {
  const number = Math.ceil(codes.length / perCell);
  const states = new Uint8Array(number);
  const shares = new Float32Array(number);
  if (perCell === 1) {
    states.set(codes);
    for (let cell = 0; cell < number; cell++) shares[cell] = FREE.includes(codes[cell]) ? 0 : 1;
    return { states, shares };
  }
  const counts = new Uint32Array(STATES.length);
  for (let cell = 0; cell < number; cell++) {
    counts.fill(0);
    const end = Math.min((cell + 1) * perCell, codes.length);
    for (let block = cell * perCell; block < end; block++) counts[codes[block]]++;
    let free = 0, best = -1;
    for (let code = 0; code < counts.length; code++) {
      if (FREE.includes(code)) free += counts[code];
      else if (counts[code] && (best < 0 || counts[code] > counts[best])) best = code;
    }
    states[cell] = best >= 0 ? best : codes[cell * perCell];
    shares[cell] = 1 - free / (end - cell * perCell);
  }
  return { states, shares };
}

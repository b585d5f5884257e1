// The band of the batch: what each row computed in the last steps. Nothing here draws.

export const MARKS = { admitted: 1, first_token: 2, finished: 4, preempted: 8, swapped_out: 16, swapped_in: 32 };

/** A frame adds at most this many columns, so that the band stays readable when steps are short. */
export const COLUMNS_PER_FRAME = 4;

/** The steps of a frame in at most COLUMNS_PER_FRAME groups of almost equal size: {first, last, seconds}. */
export function groupSteps(steps, limit = COLUMNS_PER_FRAME) {
  const groups = [];
  const number = Math.min(limit, steps.length);
  for (let index = 0; index < number; index++) {
    const part = steps.slice(Math.floor(index * steps.length / number), Math.floor((index + 1) * steps.length / number));
    groups.push({ first: part[0].step, last: part[part.length - 1].step,
      seconds: part.reduce((sum, step) => sum + step.seconds, 0) / part.length });
  }
  return groups;
}

/** How many steps of a group lie in (after, until]. */
export function stepsWithin(group, after, until) {
  return Math.max(0, Math.min(group.last, until) - Math.max(group.first, after + 1) + 1);
}

/** A ring of columns. A column is one step or a group of steps; it has a cell for each row of the batch. */
export class Band {
  constructor(numRows, capacity = 512) {
    this.numRows = numRows;
    this.capacity = capacity;
    /** Columns written so far. Column number `count - 1` is the newest. */
    this.count = 0;
    const size = numRows * capacity;
    this.columns = new Array(capacity);
    /** The number of the request that a cell belongs to. 0: no request. */
    this.owner = new Uint32Array(size);
    /** Prompt tokens that the column computed for the row. */
    this.prefill = new Float32Array(size);
    /** Tokens for each step: generated ones that were no draft tokens, accepted draft tokens, rejected draft tokens. */
    this.decode = new Float32Array(size);
    this.accepted = new Float32Array(size);
    this.rejected = new Float32Array(size);
    this.marks = new Uint8Array(size);
  }

  get first() {
    return Math.max(0, this.count - this.capacity);
  }

  column(number) {
    return this.columns[number % this.capacity];
  }

  /** The index of a cell in the arrays. */
  at(number, row) {
    return (number % this.capacity) * this.numRows + row;
  }

  /** Adds an empty column, and returns its number. */
  add(column) {
    const number = this.count++;
    this.columns[number % this.capacity] = column;
    const start = this.at(number, 0), end = start + this.numRows;
    for (const array of [this.owner, this.prefill, this.decode, this.accepted, this.rejected, this.marks]) array.fill(0, start, end);
    return number;
  }

  /** How many rows from 0 on are needed for all content of the last `columns` columns. */
  rowsInUse(columns) {
    let rows = 0;
    for (let number = Math.max(this.first, this.count - columns); number < this.count; number++) {
      const start = this.at(number, 0);
      for (let row = this.numRows - 1; row >= rows; row--) if (this.owner[start + row]) { rows = row + 1; break; }
    }
    return rows;
  }
}

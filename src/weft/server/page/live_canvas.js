// Shared by the drawings: a canvas with the size and the sharpness of its box, and the colours of the page.

const NAMES = ["paper", "panel", "raised", "hover", "ink", "soft", "line", "edge", "accent", "bad", "warn", "good",
  "data-1", "data-2", "data-3", "data-4", "data-5", "data-6", "data-7", "data-quiet", "data-empty"];
const DARK = matchMedia("(prefers-color-scheme: dark)");
let colours = null;
DARK.addEventListener("change", () => { colours = null; });

/** The colours of the style sheet by name, as text. */
export function palette() {
  if (!colours) {
    const style = getComputedStyle(document.documentElement);
    colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
  }
  return colours;
}

/** Calls `listener` when the colours change between light and dark. Returns a function that removes it. */
export function onTheme(listener) {
  DARK.addEventListener("change", listener);
  return () => DARK.removeEventListener("change", listener);
}

/** "#0b7a6e" as [11, 122, 110] */
export function channels(colour) {
  const value = parseInt(colour.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

/** A canvas that fills its box. `redraw` is called after the box got another size. */
export class Surface {
  constructor(canvas, redraw) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.width = 0;
    this.height = 0;
    new ResizeObserver(() => { if (this.measure()) redraw(); }).observe(canvas);
  }

  /** Gives the canvas the size of its box. Returns whether the size has changed. */
  measure() {
    const ratio = Math.min(devicePixelRatio || 1, 3);
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (width === this.width && height === this.height && ratio === this.ratio) return false;
    Object.assign(this, { width, height, ratio });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    return true;
  }

  /** Clears the canvas, and makes its unit a CSS pixel. Returns false if there is no room to draw. */
  begin() {
    if (!this.width || !this.height) return false;
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.context.clearRect(0, 0, this.width, this.height);
    return true;
  }
}

/** Sets the text of an element if it differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Elements of the same kind in a parent, kept and used again. */
export class Pool {
  constructor(parent, makeOne) {
    this.parent = parent;
    this.makeOne = makeOne;
    this.items = [];
  }

  /** Shows one item for each value. `makeOne()` returns {element, update(value, index)}. */
  show(values) {
    while (this.items.length < values.length) {
      const item = this.makeOne();
      this.items.push(item);
      this.parent.append(item.element);
    }
    this.items.forEach((item, index) => {
      item.element.hidden = index >= values.length;
      if (index < values.length) item.update(values[index], index);
    });
  }
}

// Makes elements. Text becomes text nodes: nothing is ever parsed as HTML.

/** `make("a", {class: "x", onclick: f}, child, "text")`. Attributes that are null or false are left out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A text field that grows with its text. In browsers without `field-sizing`, a listener sets its height. */
export function growing(attributes) {
  const area = make("textarea", { ...attributes, class: "growing" });
  if (!CSS.supports("field-sizing", "content")) {
    area.addEventListener("input", () => {
      area.style.height = "auto";
      area.style.height = `${area.scrollHeight + 2}px`;
    });
  }
  return area;
}

const SVG = "http://www.w3.org/2000/svg";

/** Outlines of the icons, in a square of 24. */
const ICONS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  pen: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 13l4 4L19 7",
  again: "M19 12a7 7 0 1 1-2-5M18 3v4h-4",
  code: "M8 7l-5 5 5 5M16 7l5 5-5 5",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  sliders: "M4 8h9M17 8h3M4 16h3M11 16h9M13 6h4v4h-4zM7 14h4v4H7z",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  play: "M8 5l11 7-11 7z",
  pause: "M9 5v14M15 5v14",
  skip: "M6 5l9 7-9 7zM18 5v14",
};

export function icon(name) {
  const image = document.createElementNS(SVG, "svg");
  image.setAttribute("viewBox", "0 0 24 24");
  image.setAttribute("class", "icon");
  image.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  image.append(path);
  return image;
}

/** A button with an icon. `text` is shown, or only read aloud and shown as a tooltip if `isShort`. */
export function button(name, text, onclick, { isShort = true, ...attributes } = {}) {
  const label = isShort ? { "aria-label": text, title: text } : {};
  return make("button", { type: "button", class: isShort ? "icon-button" : "quiet", ...label, ...attributes, onclick },
    icon(name), isShort ? null : make("span", {}, text));
}

/** Screen readers read this text aloud; it is not shown. */
export function announce(text) {
  document.getElementById("status").textContent = text;
}

/** A short message at the bottom, with an optional action `{text, run}`. A message with an action stays longer. */
export function toast(text, action = null) {
  const close = () => box.remove();
  const box = make("div", { class: "toast", role: "status" }, make("span", {}, text),
    action && make("button", { type: "button", class: "quiet", onclick: () => { close(); action.run(); } }, action.text),
    button("close", "Close the message", close));
  document.getElementById("toasts").append(box);
  setTimeout(close, action ? 12000 : 5000);
}

/** Copies a text, and shows a check mark on the button `from`. */
export async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without a secure origin (plain HTTP from another machine) browsers have only this old way.
    const area = make("textarea", { class: "unseen", value: text });
    (from.closest("dialog") || document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    from.focus();
  }
  const image = from.querySelector(".icon");
  if (image) {
    image.replaceWith(icon("check"));
    setTimeout(() => from.querySelector(".icon").replaceWith(image), 1500);
  }
  announce("Copied");
}

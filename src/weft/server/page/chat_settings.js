// The panel with the system prompt, the form of answers, tools, and all fields of the API. It writes into the settings of the
// open conversation, as text; `requestOf` reads them.

import { FORMS, rangeOf, requestOf } from "./chat_fields.js";
import { button, make } from "./dom.js";

const TOOL = {
  name: "get_weather",
  description: "The weather in a city",
  parameters: { type: "object", properties: { city: { type: "string", maxLength: 40 } }, required: ["city"] },
};
/** The example that the field for JSON shows first, by form of answers. */
const EXAMPLES = {
  json_schema: {
    type: "object",
    properties: { name: { type: "string", maxLength: 40 }, population: { type: "integer" } },
    required: ["name", "population"],
  },
  other: { type: "regex", pattern: "[0-9]{3}" },
};
const BOOLEANS = [["", "Default"], ["true", "Yes"], ["false", "No"]];

export class SettingsPanel {
  /** `onChange()`: after each change. `load()`: resolves to the fields. */
  constructor({ onChange, load }) {
    this._onChange = onChange;
    this._load = load;
    this._settings = null;
    this._controls = new Map(); // name -> {control, get, set}
    this.fields = [];
    this._problem = make("p", { class: "bad", role: "alert", hidden: true });
    this._fieldList = make("div", { class: "fields" });
    this._filter = make("input", { type: "search", id: "field-filter", placeholder: "temperature, stop, seed…", oninput: () => this._applyFilter() });
    this.element = make("div", { class: "settings-form" }, this._problem,
      this._text("system", "System prompt", { rows: "3", placeholder: "You are a helpful assistant." }),
      this._answerForm(), this._tools(),
      make("section", {}, make("h2", {}, "Parameters"), make("label", { for: "field-filter" }, "Find a field"), this._filter, this._fieldList),
      make("div", { class: "row" }, button("again", "Reset all settings", () => this._reset(), { isShort: false })));
    /** Resolves when the fields are loaded, or loading has failed. */
    this.ready = this.reload();
  }

  async reload() {
    this._fieldList.replaceChildren(make("p", { class: "hint" }, "Loading…"));
    try {
      this.fields = await this._load();
    } catch (error) {
      this._fieldList.replaceChildren(make("p", { class: "bad" }, `The fields cannot be loaded: ${error.message}`),
        button("again", "Try again", () => { this.ready = this.reload(); }, { isShort: false }));
      return;
    }
    const main = this.fields.filter((field) => field.isMain).map((field) => this._field(field));
    const others = this.fields.filter((field) => !field.isMain).map((field) => this._field(field));
    this._others = make("details", {}, make("summary", {}, `${others.length} fields with text, lists or JSON`), ...others);
    this._fieldList.replaceChildren(...main, this._others);
    this.show(this._settings);
  }

  /** Shows these settings and writes changes into them. */
  show(settings) {
    this._settings = settings;
    if (!settings) return;
    for (const [name, { set }] of this._controls) set(read(settings, name));
    this._problem.hidden = true;
    this._onShow();
  }

  /** How many settings differ from the defaults. */
  get numSet() {
    const { system, values, form, tools } = this._settings;
    const given = Object.values(values).filter((text) => text.trim()).length;
    return given + Boolean(system.trim()) + (form !== "text") + Boolean(tools.trim());
  }

  /** The fields of the request. Null: a setting is wrong, and the panel shows why. */
  request() {
    const isMissing = !this.fields.length && Object.keys(this._settings.values).length > 0;
    const { value, error, field } = isMissing ? { error: "The fields of the server are not loaded, so their values cannot be sent." }
      : requestOf(this._settings, this.fields);
    for (const [name, { control }] of this._controls) {
      const isWrong = name === (field === "response_format" ? "schema" : field);
      if (isWrong) control.setAttribute("aria-invalid", "true");
      else control.removeAttribute("aria-invalid");
    }
    this._problem.hidden = !error;
    this._problem.textContent = error || "";
    return error ? null : value;
  }

  focusProblem() {
    const wrong = this.element.querySelector("[aria-invalid=true]");
    if (wrong && this._others?.contains(wrong)) this._others.open = true;
    wrong?.scrollIntoView({ block: "center" });
    wrong?.focus({ preventScroll: true });
  }

  // --- parts ---

  _text(name, label, attributes) {
    const control = make("textarea", { id: `set-${name}`, spellcheck: "false", ...attributes });
    this._bind(name, control);
    return make("section", {}, make("h2", {}, make("label", { for: control.id }, label)), control);
  }

  _answerForm() {
    const select = make("select", { id: "set-form" }, Object.entries(FORMS).map(([value, text]) => make("option", { value }, text)));
    this._bind("form", select);
    const schema = make("textarea", { id: "set-schema", rows: "8", spellcheck: "false", class: "mono", "aria-label": "Schema of answers, as JSON" });
    this._bind("schema", schema);
    this._onShow = () => { schema.hidden = !(select.value in EXAMPLES); };
    select.addEventListener("change", () => {
      this._onShow();
      const isExample = Object.values(EXAMPLES).map(json).includes(schema.value);
      if (schema.hidden || (schema.value.trim() && !isExample)) return;
      schema.value = json(EXAMPLES[select.value]);
      this._changed("schema", schema.value);
    });
    return make("section", {}, make("h2", {}, make("label", { for: "set-form" }, "Form of answers")), select, schema);
  }

  _tools() {
    const control = make("textarea", { id: "set-tools", rows: "3", spellcheck: "false", class: "mono", placeholder: '[{"name": …, "parameters": …}]' });
    const { set } = this._bind("tools", control);
    const insert = () => {
      set(json([TOOL]));
      control.rows = 12;
      this._changed("tools", control.value);
      control.focus();
    };
    return make("section", {}, make("h2", {}, make("label", { for: "set-tools" }, "Tools")), control,
      make("p", { class: "hint" }, "When the model calls one, you type its result."),
      button("plus", "Insert an example", insert, { isShort: false }));
  }

  _field(field) {
    const { name, kind, description, fallback } = field;
    const id = `set-${name}`;
    const attributes = { id, "aria-describedby": `${id}-hint` };
    let control;
    if (kind === "boolean") control = make("select", attributes, BOOLEANS.map(([value, text]) => make("option", { value }, text)));
    else if (kind === "json" || kind === "lines") control = make("textarea", { ...attributes, rows: "2", spellcheck: "false", class: "mono" });
    else control = make("input", { ...attributes, spellcheck: "false", autocomplete: "off", inputmode: kind === "number" ? (field.isWhole ? "numeric" : "decimal") : null });
    const empty = fallback === null || kind === "boolean" ? "default" : `default: ${JSON.stringify(fallback)}`;
    if (kind !== "boolean") control.placeholder = kind === "lines" ? "one on each line" : empty;
    this._bind(name, control);
    const range = rangeOf(field);
    return make("div", { class: "field", "data-name": name },
      make("label", { for: id }, make("code", {}, name), range && make("span", { class: "range" }, range)),
      control, make("p", { class: "hint", id: `${id}-hint` }, description));
  }

  /** Connects a control with the setting of this name. */
  _bind(name, control) {
    const bound = { control, set: (text) => { control.value = text; } };
    control.addEventListener(control.tagName === "SELECT" ? "change" : "input", () => this._changed(name, control.value));
    this._controls.set(name, bound);
    return bound;
  }

  _changed(name, text) {
    this._controls.get(name).control.removeAttribute("aria-invalid");
    write(this._settings, name, text);
    this._onChange();
  }

  _applyFilter() {
    const words = this._filter.value.trim().toLowerCase();
    for (const one of this._fieldList.querySelectorAll(".field")) {
      one.hidden = Boolean(words) && !one.textContent.toLowerCase().includes(words);
    }
    if (this._others) this._others.open = Boolean(words) && Boolean(this._others.querySelector(".field:not([hidden])"));
  }

  _reset() {
    Object.assign(this._settings, { system: "", values: {}, form: "text", schema: "", tools: "" });
    this.show(this._settings);
    this._onChange();
  }
}

function json(value) {
  return JSON.stringify(value, null, 2);
}

const OWN = ["system", "form", "schema", "tools"];

function read(settings, name) {
  return OWN.includes(name) ? settings[name] : settings.values[name] ?? "";
}

function write(settings, name, text) {
  if (OWN.includes(name)) settings[name] = text;
  else if (text) settings.values[name] = text;
  else delete settings.values[name];
}

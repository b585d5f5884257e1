// Reads the fields of a chat request from the OpenAPI document (kind, range, description), and parses the values that the
// user types.

/** Fields that the chat sets itself. */
const OWN = new Set(["messages", "stream", "stream_options", "tools", "response_format"]);
const PATH = "/v1/chat/completions";

/** A list of {name, kind, isTextToo, isWhole, minimum, above, maximum, fallback, description, isMain}.
 *  Kinds: number, boolean, text, number-or-text, lines, numbers, json. `isTextToo`: a field for JSON also takes plain text.
 *  `isMain`: the field is a number or a boolean. */
export function fieldsOf(openapi) {
  const { schema } = openapi.paths[PATH].post.requestBody.content["application/json"];
  const { properties } = resolved(openapi, schema);
  return Object.entries(properties).filter(([name]) => !OWN.has(name)).map(([name, one]) => fieldOf(name, one, openapi));
}

/** The schema that `$ref` names, or the schema itself. */
function resolved(openapi, schema) {
  return schema.$ref ? openapi.components.schemas[schema.$ref.split("/").pop()] : schema;
}

function fieldOf(name, schema, openapi) {
  const types = alternatives(schema, openapi).filter((one) => one.type !== "null");
  const has = (type) => types.some((one) => one.type === type);
  const list = types.find((one) => one.type === "array");
  const isNumber = has("number") || has("integer");
  let kind = "json";
  if (has("object")) kind = "json";
  else if (list) kind = { string: "lines", integer: "numbers", number: "numbers" }[list.items?.type] ?? "json";
  else if (isNumber) kind = has("string") ? "number-or-text" : "number";
  else if (has("boolean")) kind = "boolean";
  else if (has("string")) kind = "text";
  return {
    name, kind,
    isTextToo: kind === "json" && has("string"),
    isWhole: isNumber && !has("number"),
    minimum: schema.minimum ?? null,
    above: schema.exclusiveMinimum ?? null,
    maximum: schema.maximum ?? null,
    fallback: schema.default ?? null,
    description: schema.description ?? "",
    isMain: kind === "number" || kind === "boolean",
  };
}

/** All schemas that a value may match: `anyOf` may contain `anyOf`. */
function alternatives(schema, openapi) {
  const one = resolved(openapi, schema);
  return one.anyOf ? one.anyOf.flatMap((each) => alternatives(each, openapi)) : [one];
}

/** A range in words: "0 to 2", "above 0, up to 1"; "" if there is none. Limits of the number format are left out. */
export function rangeOf({ minimum, above, maximum }) {
  const isLarge = (value) => value === null || Math.abs(value) > 1e9;
  const low = above !== null ? `above ${above}` : isLarge(minimum) ? "" : String(minimum);
  if (isLarge(maximum)) return low && (above !== null ? low : `from ${low}`);
  if (!low) return `up to ${maximum}`;
  return above !== null ? `${low}, up to ${maximum}` : `${low} to ${maximum}`;
}

/** The value of a field that was typed as text: {value}, or {error}. Empty text means that the field is not sent. */
export function valueOf(field, text) {
  const typed = text.trim();
  if (!typed) return { value: undefined };
  const wrong = (allowed) => ({ error: `${field.name} is ${shortened(typed)}; allowed: ${allowed}.` });
  switch (field.kind) {
    case "number":
      return numberOf(field, typed, wrong);
    case "number-or-text":
      return Number.isFinite(Number(typed)) ? numberOf(field, typed, wrong) : { value: typed };
    case "boolean":
      return typed === "true" || typed === "false" ? { value: typed === "true" } : wrong("true or false");
    case "text":
      return { value: typed };
    case "lines":
      if (/^[["]/.test(typed)) return jsonOf(field, typed, false);
      return { value: text.split("\n").filter((line) => line !== "") };
    case "numbers": {
      const values = typed.replace(/^\[|\]$/g, "").split(/[\s,]+/).filter(Boolean).map(Number);
      return values.every(Number.isSafeInteger) ? { value: values } : wrong("whole numbers, with commas or spaces between them");
    }
    default:
      return jsonOf(field, typed, field.isTextToo);
  }
}

function numberOf(field, typed, wrong) {
  const value = Number(typed);
  const { minimum, above, maximum } = field;
  const isOutside = (minimum !== null && value < minimum) || (above !== null && value <= above) || (maximum !== null && value > maximum);
  const isNumber = Number.isFinite(value) && (!field.isWhole || Number.isInteger(value));
  const range = rangeOf(field);
  if (!isNumber || isOutside) return wrong([field.isWhole ? "a whole number" : "a number", range].filter(Boolean).join(", "));
  // JavaScript would round a larger number, and the server would get another one.
  if (field.isWhole && !Number.isSafeInteger(value)) return wrong(`a whole number up to ${Number.MAX_SAFE_INTEGER} in this page`);
  return { value };
}

function jsonOf(field, typed, isTextToo) {
  const found = readJson(typed);
  if (found.error && isTextToo && !/^[{["]/.test(typed)) return { value: typed };
  return found.error ? { error: `${field.name} is not JSON: ${found.error}.` } : found;
}

/** Parses JSON: {value}, or {error} with the message of the browser. */
export function readJson(text) {
  try {
    return { value: JSON.parse(text) };
  } catch (error) {
    return { error: error.message.replace(/\.$/, "") };
  }
}

function shortened(text) {
  return text.length > 60 ? text.slice(0, 57) + "…" : text;
}

/** Parses the typed tools: {value}, or {error}. The text is one tool or a list; each is a whole tool or only its function. */
export function toolsOf(text) {
  if (!text.trim()) return { value: undefined };
  const { value, error } = readJson(text);
  if (error) return { error: `The tools are not JSON: ${error}.` };
  const given = Array.isArray(value) ? value : [value];
  for (const one of given) {
    if (one === null || typeof one !== "object" || Array.isArray(one)) return { error: "A tool is a JSON object with a name." };
    if (!one.type && !one.name) return { error: "A tool has no name; write {\"name\": …, \"description\": …, \"parameters\": …}." };
  }
  return { value: given.length ? given.map((one) => (one.function || one.custom ? one : { type: "function", function: one })) : undefined };
}

/** Forms of an answer that the page offers. */
export const FORMS = { text: "Text", json_object: "Any JSON", json_schema: "JSON with a schema", other: "Another response_format" };

/** `response_format` from the chosen form and the typed text: {value}, or {error}. */
export function formatOf(form, text) {
  if (form === "text") return { value: undefined };
  if (form === "json_object") return { value: { type: "json_object" } };
  const { value, error } = readJson(text);
  if (error) return { error: `The ${form === "json_schema" ? "schema" : "response_format"} is not JSON: ${error}.` };
  if (form === "other") return { value };
  return { value: { type: "json_schema", json_schema: { name: "answer", schema: value, strict: true } } };
}

/** The request without its messages, from the settings of a conversation: {value}, or {error, field}. */
export function requestOf(settings, fields) {
  const request = {};
  for (const field of fields) {
    const { value, error } = valueOf(field, settings.values[field.name] ?? "");
    if (error) return { error, field: field.name };
    if (value !== undefined) request[field.name] = value;
  }
  for (const [name, found] of [["response_format", formatOf(settings.form, settings.schema)], ["tools", toolsOf(settings.tools)]]) {
    if (found.error) return { error: found.error, field: name };
    if (found.value !== undefined) request[name] = found.value;
  }
  return { value: request };
}

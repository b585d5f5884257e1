// Writes a request as a curl command and as a Python program. The API key is a variable in both.

const VARIABLE = "WEFT_API_KEY";
const PATH = "v1/chat/completions";

/** Arguments that `create` of the openai package has. The others are sent in `extra_body`. */
const ARGUMENTS = new Set(["messages", "model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "temperature",
  "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "logprobs", "top_logprobs", "tools", "tool_choice",
  "parallel_tool_calls", "response_format", "reasoning_effort", "prediction", "verbosity", "modalities", "user", "metadata", "store",
  "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]);

export function asCurl(base, body, needsKey) {
  const lines = [`curl ${quoted(base + PATH)}`, `-H "Content-Type: application/json"`];
  if (needsKey) lines.push(`-H "Authorization: Bearer $${VARIABLE}"`);
  lines.push(`-d ${quoted(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n  ") + "\n";
}

/** The text as one quoted word of a POSIX shell. */
function quoted(text) {
  return `'${text.replace(/'/g, "'\\''")}'`;
}

/** `model`: the name that the server gave with the answer. The openai package needs one. */
export function asPython(base, body, needsKey, model) {
  const given = { model, ...body, stream: true };
  const names = Object.keys(given).filter((name) => ARGUMENTS.has(name));
  const others = Object.fromEntries(Object.entries(given).filter(([name]) => !ARGUMENTS.has(name)));
  const args = names.map((name) => `    ${name}=${literal(given[name], 1)},\n`);
  if (Object.keys(others).length) args.push(`    extra_body=${literal(others, 1)},\n`);
  const key = needsKey ? `os.environ["${VARIABLE}"]` : `os.environ.get("${VARIABLE}", "none")`;
  return `import os

from openai import OpenAI

client = OpenAI(base_url=${literal(base + "v1")}, api_key=${key})
stream = client.chat.completions.create(
${args.join("")})
for chunk in stream:
    for choice in chunk.choices:
        if choice.delta.tool_calls:
            print(choice.delta.tool_calls)
        print(choice.delta.content or "", end="", flush=True)
print()
`;
}

/** A value as a Python expression, on several lines if it is long. */
function literal(value, depth = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") return JSON.stringify(value); // escapes of JSON mean the same in Python
  if (typeof value === "number") return String(value);
  const isList = Array.isArray(value);
  const parts = isList ? value.map((one) => literal(one, depth + 1))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, depth + 1)}`);
  const [open, close] = isList ? ["[", "]"] : ["{", "}"];
  const line = open + parts.join(", ") + close;
  if (line.length < 80 && !line.includes("\n")) return line;
  const indent = "    ".repeat(depth + 1);
  return `${open}\n${parts.map((one) => `${indent}${one},\n`).join("")}${"    ".repeat(depth)}${close}`;
}

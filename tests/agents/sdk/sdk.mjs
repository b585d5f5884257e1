// One task by one client from npm: node sdk.mjs CLIENT TASK URL KEY PROMPT. Writes one line of JSON.
// Tasks: "loop" (a streamed conversation with a tool that reads a file), "talk" (a streamed answer), "person" (a
// structured answer).

import { readFile } from "node:fs/promises";
import { existsSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { Output, isStepCount, streamText, tool } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [client, task, url, key, prompt] = process.argv.slice(2);
const model = "default";
const messages = [{ role: "user", content: prompt }];
const limits = { max_tokens: 200, temperature: 0 };
const Person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
const Arguments = z.object({ path: z.string() });
const description = "Reads a file.";
const parameters = z.toJSONSchema(Arguments);

// The file WAIT, if the test made one, holds the call until the test removes it.
async function read({ path }) {
  while (existsSync("WAIT")) await sleep(50);
  return readFile(path, "utf8");
}

// Asks again if the server has answered 429, for a package that does not.
async function patient(ask) {
  for (;;) {
    try {
      return await ask();
    } catch (error) {
      if (error.status_code !== 429) throw error;
      await sleep(1000);
    }
  }
}

async function aiSdk(languageModel) {
  const fields = { model: languageModel, prompt, maxOutputTokens: limits.max_tokens, temperature: 0 };
  fields.onError = ({ error }) => console.error(error);
  if (task === "loop") {
    fields.tools = { read_file: tool({ description, inputSchema: Arguments, execute: read }) };
    fields.stopWhen = isStepCount(4);
  }
  if (task === "person") fields.output = Output.object({ schema: Person });
  const result = streamText(fields);
  let pieces = 0;
  for await (const _ of result.textStream) pieces += 1;
  if (task === "person") return { person: await result.output };
  return { text: await result.text, pieces, steps: (await result.steps).length };
}

async function openaiChat() {
  const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
  const fields = { model, messages, ...limits };
  if (task === "person") {
    const answer = await openai.chat.completions.parse({ ...fields, response_format: zodResponseFormat(Person, "person") });
    return { person: answer.choices[0].message.parsed };
  }
  let pieces = 0;
  if (task === "talk") {
    const stream = openai.chat.completions.stream(fields).on("content", () => (pieces += 1));
    return { text: await stream.finalContent(), pieces };
  }
  const definition = { name: "read_file", description, parameters, function: read, parse: JSON.parse };
  const runner = openai.chat.completions.runTools({ ...fields, stream: true, tools: [{ type: "function", function: definition }] });
  runner.on("content", () => (pieces += 1));
  return { text: await runner.finalContent(), pieces };
}

async function openaiResponses() {
  const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
  const fields = { model, max_output_tokens: limits.max_tokens, temperature: 0 };
  if (task === "person") {
    const answer = await openai.responses.parse({ ...fields, input: prompt, text: { format: zodTextFormat(Person, "person") } });
    return { person: answer.output_parsed };
  }
  const tools = task === "loop" ? [{ type: "function", name: "read_file", description, parameters, strict: true }] : undefined;
  const input = [...messages];
  for (let pieces = 0, steps = 1; ; steps += 1) {
    const stream = openai.responses.stream({ ...fields, input, tools });
    stream.on("response.output_text.delta", () => (pieces += 1));
    const answer = await stream.finalResponse();
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) return { text: answer.output_text, pieces, steps };
    input.push(...answer.output);
    for (const call of calls) {
      const output = await read(JSON.parse(call.arguments));
      input.push({ type: "function_call_output", call_id: call.call_id, output });
    }
  }
}

async function anthropicMessages() {
  const anthropic = new Anthropic({ baseURL: url, apiKey: key });
  const fields = { model, messages, ...limits };
  if (task === "person") {
    const answer = await anthropic.messages.parse({ ...fields, output_config: { format: zodOutputFormat(Person) } });
    return { person: answer.parsed_output };
  }
  let pieces = 0;
  const textOf = (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join("");
  if (task === "talk") {
    const stream = anthropic.messages.stream(fields).on("text", () => (pieces += 1));
    return { text: textOf(await stream.finalMessage()), pieces };
  }
  const tools = [betaZodTool({ name: "read_file", description, inputSchema: Arguments, run: read })];
  let text = "";
  for await (const stream of anthropic.beta.messages.toolRunner({ ...fields, tools, stream: true })) {
    stream.on("text", () => (pieces += 1));
    text = textOf(await stream.finalMessage());
  }
  return { text, pieces };
}

async function ollamaChat() {
  const ollama = new Ollama({ host: url, headers: { Authorization: `Bearer ${key}` } });
  const fields = { model, options: { num_predict: limits.max_tokens, temperature: 0 } };
  if (task === "person") {
    const answer = await ollama.chat({ ...fields, messages, format: z.toJSONSchema(Person) });
    return { person: Person.parse(JSON.parse(answer.message.content)) };
  }
  const tools = task === "loop" ? [{ type: "function", function: { name: "read_file", description, parameters } }] : undefined;
  const history = [...messages];
  for (let pieces = 0, steps = 1; ; steps += 1) {
    let text = "";
    const calls = [];
    for await (const part of await patient(() => ollama.chat({ ...fields, messages: history, tools, stream: true }))) {
      if (part.message.content) pieces += 1;
      text += part.message.content;
      calls.push(...(part.message.tool_calls ?? []));
    }
    if (!calls.length) return { text, pieces, steps };
    history.push({ role: "assistant", content: text, tool_calls: calls });
    for (const call of calls) {
      history.push({ role: "tool", tool_name: call.function.name, content: await read(call.function.arguments) });
    }
  }
}

const clients = {
  "ai-openai": () => aiSdk(createOpenAI({ baseURL: `${url}/v1`, apiKey: key })(model)),
  "ai-openai-chat": () => aiSdk(createOpenAI({ baseURL: `${url}/v1`, apiKey: key }).chat(model)),
  "ai-anthropic": () => aiSdk(createAnthropic({ baseURL: `${url}/v1`, apiKey: key })(model)),
  "ai-openai-compatible": () =>
    aiSdk(createOpenAICompatible({ name: "weft", baseURL: `${url}/v1`, apiKey: key, supportsStructuredOutputs: true })(model)),
  "openai-chat": openaiChat,
  "openai-responses": openaiResponses,
  anthropic: anthropicMessages,
  ollama: ollamaChat,
};
console.log(JSON.stringify(await clients[client]()));

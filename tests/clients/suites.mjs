// Calls of the official SDKs of Node: `node suites.mjs URL KEY MODEL`; prints a JSON line for each check.
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import { generateText, generateObject, streamText, jsonSchema } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const [url, key, model] = process.argv.slice(2);
const question = "Who built the third mill?";
const messages = [{ role: "user", content: question }];
const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 4 } },
  required: ["city"],
};
const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
const max_tokens = 60;

async function check(suite, name, run) {
  let reason = "";
  try {
    if (!(await run())) reason = "another result than expected";
  } catch (error) {
    reason = String(error.message ?? error).slice(0, 300);
  }
  console.log(JSON.stringify({ suite, check: name, reason }));
}

async function gather(stream, piece) {
  let text = "";
  for await (const event of stream) text += piece(event) ?? "";
  return text;
}

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const chat = (more) => openai.chat.completions.create({ model, messages, max_tokens, ...more });
const forced = { tools, tool_choice: "required" };
const isCity = (text) => typeof JSON.parse(text).city === "string";
let suite = "openai (Node)";
await check(suite, "chat", async () => (await chat()).choices[0].message.refusal === null);
await check(suite, "chat stream", async () => (await gather(await chat({ stream: true }), (e) => e.choices[0]?.delta.content)).length);
await check(suite, "chat tool", async () => isCity((await chat(forced)).choices[0].message.tool_calls[0].function.arguments));
await check(suite, "chat tool stream", async () =>
  isCity(await gather(await chat({ ...forced, stream: true }), (e) => e.choices[0]?.delta.tool_calls?.[0].function.arguments)));
await check(suite, "chat schema", async () =>
  isCity((await chat({ response_format: { type: "json_schema", json_schema: { name: "x", schema } } })).choices[0].message.content));
await check(suite, "chat prefill", async () => (await chat({ messages: [...messages, { role: "assistant", content: "It was" }] })).choices.length);
const made = await openai.responses.create({ model, input: question, max_output_tokens: 20 }).catch(() => ({}));
await check(suite, "responses", async () => made.status && Number.isInteger(made.created_at));
await check(suite, "responses stream", async () =>
  (await gather(await openai.responses.create({ model, input: question, stream: true, max_output_tokens: 20 }), (e) => e.type)).startsWith("response.created"));
await check(suite, "responses retrieve", async () => (await openai.responses.retrieve(made.id)).id === made.id);
await check(suite, "responses input items", async () => (await openai.responses.inputItems.list(made.id)).data[0].content[0].text === question);
await check(suite, "responses input tokens", async () => (await openai.responses.inputTokens.count({ model, input: question })).input_tokens > 0);
await check(suite, "models", async () => (await openai.models.list()).data[0].id === model);

const anthropic = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const message = (more) => anthropic.messages.create({ model, messages, max_tokens, ...more });
const claude = { tools: [{ name: "weather", input_schema: schema }], tool_choice: { type: "any" } };
suite = "anthropic (Node)";
await check(suite, "message", async () => (await message()).content[0].type === "text");
await check(suite, "message stream", async () => (await anthropic.messages.stream({ model, messages, max_tokens }).finalMessage()).usage.input_tokens > 0);
await check(suite, "tool", async () => typeof (await message(claude)).content[0].input.city === "string");
await check(suite, "count tokens", async () => (await anthropic.messages.countTokens({ model, messages })).input_tokens > 0);
await check(suite, "schema", async () => isCity((await message({ output_config: { format: { type: "json_schema", schema } } })).content[0].text));
await check(suite, "models", async () => (await anthropic.models.list()).data[0].id === model);

const ollama = new Ollama({ host: url, headers: { Authorization: `Bearer ${key}` } });
suite = "ollama (Node)";
await check(suite, "chat", async () => (await ollama.chat({ model, messages, options: { num_predict: 20 } })).done);
await check(suite, "chat stream", async () =>
  (await gather(await ollama.chat({ model, messages, stream: true, options: { num_predict: 20 } }), (e) => e.message.content)).length);
await check(suite, "generate", async () => (await ollama.generate({ model, prompt: question, options: { num_predict: 20, top_k: 40, temperature: 0.8 } })).done);
await check(suite, "format", async () => isCity((await ollama.chat({ model, messages, format: schema })).message.content));
await check(suite, "list, show, ps", async () =>
  (await ollama.list()).models[0].name && (await ollama.show({ model })).details && (await ollama.ps()).models.length);

const own = createOpenAICompatible({ name: "kvtool", baseURL: `${url}/v1`, apiKey: key, supportsStructuredOutputs: true })(model);
suite = "ai (Vercel)";
await check(suite, "text", async () => (await generateText({ model: own, prompt: question, maxOutputTokens: 20 })).finishReason);
await check(suite, "stream", async () => (await gather(streamText({ model: own, prompt: question, maxOutputTokens: 20 }).textStream, (e) => e)).length);
await check(suite, "object", async () => typeof (await generateObject({ model: own, prompt: question, schema: jsonSchema(schema) })).object.city === "string");

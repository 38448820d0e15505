// Drives a server with Vercel's `ai` through each of its providers, and prints what they understood as one JSON object.
// Usage: node vercel.mjs http://127.0.0.1:8000/v1 MODEL

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // they go to where the result does
const [baseURL, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "What is the capital of France?" }];
const LONG = [{ role: "user", content: "Count from one to a thousand in words, without a pause." }];
const Place = z.object({ city: z.enum(["Paris", "Rome"]), large: z.boolean() });
const inputSchema = jsonSchema({
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
});
const weather = tool({ description: "The weather", inputSchema, execute: async ({ city }) => ({ city, sky: "rain" }) });

const compatible = createOpenAICompatible({ name: "headrace", baseURL, includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL, apiKey: "none" });
const anthropic = createAnthropic({ baseURL, apiKey: "none" });
const oneCall = { headrace: { parallel_tool_calls: false }, openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } };
const providers = {
  compatible,
  chat: (name) => openai.chat(name),
  responses: (name) => openai.responses(name),
  anthropic,
};

async function drive(provider) {
  const settings = { model: provider(model), messages, temperature: 0, maxRetries: 0 };
  const brief = { ...settings, maxOutputTokens: 60 };
  const found = {};

  // No limit of the caller's: Anthropic's provider sends the one that it knows for the model.
  const whole = await generateText(settings);
  found.text = whole.text;
  found.usage = whole.usage;
  found.finishReason = whole.finishReason;

  const stream = streamText(settings);
  found.streamed = "";
  for await (const delta of stream.textStream) found.streamed += delta;
  found.streamedFinishReason = await stream.finishReason;
  found.streamedUsage = await stream.usage;

  found.object = (await generateText({ ...brief, output: Output.object({ schema: Place }) })).output;
  const partial = streamText({ ...brief, output: Output.object({ schema: Place }) });
  for await (const object of partial.partialOutputStream) found.streamedObject = object;

  // A call, its result, and an answer to that.
  const rounds = {
    ...brief,
    tools: { weather },
    providerOptions: oneCall,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  };
  const round = await generateText(rounds);
  found.round = steps(round.steps);
  const streamedRound = streamText(rounds);
  for await (const part of streamedRound.fullStream) if (part.type === "error") throw part.error;
  found.streamedRound = steps(await streamedRound.steps);

  const controller = new AbortController();
  const endless = streamText({ ...settings, messages: LONG, maxOutputTokens: 4000, abortSignal: controller.signal });
  found.parts = new Set();
  for await (const part of endless.fullStream) {
    found.parts.add(part.type);
    if (part.type === "text-delta") controller.abort();
  }
  found.parts = [...found.parts];

  found.error = await generateText({ ...settings, model: provider("nothing") }).catch((error) => ({
    name: error.name,
    status: error.statusCode,
    message: error.message,
  }));
  return found;
}

function steps(all) {
  return all.map(({ finishReason, text, toolCalls, toolResults }) => ({
    finishReason,
    text,
    calls: toolCalls.map(({ toolName, input }) => ({ toolName, input })),
    results: toolResults.map(({ output }) => output),
  }));
}

async function embed(provider) {
  const { embeddings } = await embedMany({ model: provider.textEmbeddingModel(model), values: ["a", "b"] });
  return embeddings.map((vector) => vector.length);
}

const found = {};
for (const [name, provider] of Object.entries(providers)) found[name] = await drive(provider);
found.compatible.embeddings = await embed(compatible);
found.chat.embeddings = await embed(openai);
console.log(JSON.stringify(found));

// Drives a server with npm's `openai`, and prints what it understood as one JSON object.
// Usage: node clients.mjs http://127.0.0.1:8000/v1 MODEL

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "What is the capital of France?" }];
const Place = z.object({ city: z.enum(["Paris", "Rome"]), large: z.boolean() });
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};

async function openai() {
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const settings = { model, messages, temperature: 0, max_tokens: 12 };
  const found = {};

  found.models = (await client.models.list()).data.map((card) => card.id);

  const whole = await client.chat.completions.create(settings);
  found.text = whole.choices[0].message.content;
  found.usage = whole.usage;

  const stream = await client.chat.completions.create({
    ...settings,
    stream: true,
    stream_options: { include_usage: true },
  });
  found.streamed = "";
  for await (const chunk of stream) {
    found.streamed += chunk.choices[0]?.delta.content ?? "";
    found.streamedUsage = chunk.usage ?? found.streamedUsage;
    found.finishReason = chunk.choices[0]?.finish_reason ?? found.finishReason;
  }

  const helper = client.chat.completions.stream(settings);
  found.accumulated = (await helper.finalChatCompletion()).choices[0].message.content;

  const parsed = await client.chat.completions.parse({
    ...settings,
    max_tokens: 60,
    response_format: zodResponseFormat(Place, "place"),
  });
  found.parsed = parsed.choices[0].message.parsed;

  const calling = client.chat.completions.stream({
    ...settings,
    max_tokens: 60,
    tools: [{ type: "function", function: { name: "weather", description: "The weather", parameters } }],
    tool_choice: "required",
  });
  const [call] = (await calling.finalChatCompletion()).choices[0].message.tool_calls;
  found.call = { name: call.function.name, arguments: JSON.parse(call.function.arguments) };

  const completion = await client.completions.create({ model, prompt: "One, two,", temperature: 0, max_tokens: 4 });
  found.completion = completion.choices[0].text;

  const vectors = await client.embeddings.create({ model, input: ["a", "b"] });
  found.embeddings = vectors.data.map((item) => item.embedding.length);

  const response = await client.responses.create({ model, input: messages[0].content, temperature: 0, max_output_tokens: 12 });
  found.response = response.output_text;
  found.events = [];
  const events = await client.responses.create({
    model,
    input: messages[0].content,
    temperature: 0,
    max_output_tokens: 12,
    stream: true,
  });
  for await (const event of events) {
    if (found.events.at(-1) !== event.type) found.events.push(event.type);
  }

  found.error = await client.chat.completions.create({ ...settings, temperature: 7 }).catch((error) => ({
    type: error.constructor.name,
    status: error.status,
    param: error.param,
  }));
  return found;
}

console.log(JSON.stringify(await openai()));

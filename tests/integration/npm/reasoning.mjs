// Drives a model that thinks with Vercel's `ai`, and prints what it understood as one JSON object.
// Usage: node reasoning.mjs http://127.0.0.1:8000/v1 MODEL
// The model is random, so the conversation opens the reasoning: the client has begun the answer.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [baseURL, model] = process.argv.slice(2);
const providers = {
  compatible: createOpenAICompatible({ name: "headrace", baseURL }),
  anthropic: createAnthropic({ baseURL, apiKey: "none" }),
};

const found = {};
for (const [name, provider] of Object.entries(providers)) {
  const settings = {
    model: provider(model),
    messages: [
      { role: "user", content: "Hi." },
      { role: "assistant", content: "<think>" },
    ],
    temperature: 0,
    maxOutputTokens: 8,
    maxRetries: 0,
    providerOptions: { headrace: { add_generation_prompt: false, continue_final_message: true } },
  };
  const whole = await generateText(settings);
  const parts = {};
  for await (const part of streamText(settings).fullStream) parts[part.type] = (parts[part.type] ?? "") + (part.text ?? "");
  found[name] = { text: whole.text, reasoning: whole.reasoningText, streamed: parts["reasoning-delta"], parts: Object.keys(parts) };
}
console.log(JSON.stringify(found));

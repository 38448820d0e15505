// Drives a server with npm's `ollama`, and prints what it understood as one JSON object.
// Usage: node ollama.mjs http://127.0.0.1:8000 MODEL

import { Ollama } from "ollama";

const [host, model] = process.argv.slice(2);
const client = new Ollama({ host });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const options = { temperature: 0, num_predict: 12 };
const found = {};

async function failure(call) {
  try {
    for await (const _ of await call()) break;
    return null;
  } catch (error) {
    return { status: error.status_code ?? null, message: error.message };
  }
}

found.models = (await client.list()).models.map((each) => each.model);
found.loaded = (await client.ps()).models.map((each) => each.context_length);
found.capabilities = (await client.show({ model })).capabilities;
found.version = (await client.version()).version;

const whole = await client.chat({ model, messages, options });
found.text = whole.message.content;
found.counts = [whole.prompt_eval_count, whole.eval_count];
found.reason = whole.done_reason;

found.streamed = "";
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  found.streamed += part.message.content;
  if (part.done) found.streamedCounts = [part.prompt_eval_count, part.eval_count];
}

found.left = 0;
const endless = await client.chat({ model, messages, options: { temperature: 0, num_predict: 500 }, stream: true });
try {
  for await (const _ of endless) if (++found.left === 3) endless.abort();
} catch (error) {
  found.aborted = error.name;
}

found.completion = (await client.generate({ model, prompt: "One, two,", raw: true, options })).response;
found.embeddings = (await client.embed({ model, input: ["a", "b"] })).embeddings.map((each) => each.length);
found.form = JSON.parse(
  (
    await client.chat({
      model,
      messages,
      options: { ...options, num_predict: 60 },
      format: { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] },
    })
  ).message.content,
);
found.unknown = await failure(() => client.chat({ model: "nothing", messages, stream: true }));
found.refused = await failure(() => client.chat({ model, messages, options: { top_p: 7 }, stream: true }));
found.late = await failure(async () => {
  const parts = await client.pull({ model: "../nothing", stream: true });
  for await (const part of parts) found.pulling = part.status;
  return parts;
});

console.log(JSON.stringify(found));

// Simulate: the server's own scheduler on a virtual clock. Arrivals above, the active set in the middle, what came out
// below. Every request says all parameters and changes, so the same simulation can be had again at any time.
import { BOTTOM, drawAxes, LEFT, roundUp, tick } from "./axes.js";
import { colours, fit, h, number, seconds } from "./dom.js";
import { History } from "./history.js";
import { explain, Lanes } from "./lanes.js";
import { record } from "./recording.js";
import { ask, Refused } from "./server.js";
import { legend } from "./view.js";

const TICK = 125; // milliseconds
const SPAN = 20; // virtual seconds that are shown
const SLIDERS = [ // name, words, least, most, step, unit
  ["rate", "Arrivals", 0.5, 20, 0.5, "/s"], ["max_num_seqs", "Slots", 1, 64, 1, ""], ["step_seconds", "Step time", 0.005, 0.1, 0.005, "s"],
  ["input_len", "Prompt, mean", 8, 1024, 8, "tokens"], ["output_len", "Answer, mean", 4, 256, 4, "tokens"], ["max_num_batched_tokens", "Budget of a step", 256, 2048, 64, "tokens"],
];
const TOP = 10; // pixels above the highest value
const LESSONS = { // what a preset is called, and what to look at
  comfortable: ["Comfortable", "3 requests a second and 8 slots, which could serve 13: hardly one waits. Move “Arrivals” up until the queue grows."],
  overloaded: ["Overloaded", "8 requests a second and 4 slots, which serve 6.7: the queue grows without bound. Move “Slots” up to see the queue empty."],
  "one slot": ["One at a time", "2 requests a second and 1 slot, which could serve 2.8: all are served, and one in a hundred waits for seconds."],
  bursts: ["Everyone at once", "3 requests a second on average and 4 slots, but the requests come in bursts: the slots that were enough are not while a burst lasts."],
  "long prompts": ["Long documents", "Prompts of 800 tokens fill the budget of a step: their prefill delays every first token. Move “Budget of a step”."],
};

export class Simulate {
  constructor(root) {
    this.notice = h("p.notice", { role: "status", hidden: true });
    this.run = h("button.primary", { onclick: () => this.setRunning(!this.running) }, "Run");
    this.speed = h("select", { ariaLabel: "Speed" }, ...[1, 5, 20].map((speed) => h("option", { value: speed, selected: speed === 5 }, `× ${speed}`)));
    this.clock = h("span.where");
    this.presets = h("span.bar");
    this.inputs = {};
    const sliders = h("div.sliders", {}, ...SLIDERS.map(([name, words, min, max, step, unit]) => {
      const output = h("output");
      const input = h("input", { type: "range", min, max, step, ariaLabel: words });
      const show = () => { output.textContent = `${name === "step_seconds" ? seconds(Number(input.value)) : `${input.value} ${unit}`}`; };
      input.addEventListener("input", () => { show(); this.change(name, Number(input.value)); });
      this.inputs[name] = { input, show };
      return h("label", {}, h("span", {}, words, output), input);
    }));
    this.figures = h("dl.figures");
    this.arrivals = h("canvas.arrivals", { role: "img", ariaLabel: "Arrivals and the queue" });
    this.active = h("canvas.lanes", { role: "img", ariaLabel: "The active set" });
    this.outputs = h("canvas.outputs", { role: "img", ariaLabel: "Outputs" });
    this.lanes = new Lanes(this.active, () => {}, 40);
    this.lanes.onPoint = () => this.draw();
    this.words = h("p.explained");
    this.lesson = h("p.lesson", { role: "status" }, "Choose a situation, or move the sliders.");
    root.append(this.notice,
      h("div.panel", {}, h("div.bar.controls", {}, this.presets, h("span.spacer"), this.clock, this.speed, h("button", { onclick: () => this.step() }, "One step"), h("button", { onclick: () => this.begin() }, "Restart"), this.run), sliders, this.lesson),
      this.figures,
      h("div.panel", {}, h("div.bar", {}, h("h2", {}, "Arrivals"), legend("decode", "running or done"), legend("warn", "waiting"), legend("faint", "how many wait (scale at the left)")), this.arrivals),
      h("div.panel", {}, h("div.bar", {}, h("h2", {}, "Active set"), legend("prefill", "prefill"), legend("decode", "decode")), this.active, this.words),
      h("div.panel", {}, h("div.bar", {}, h("h2", {}, "Outputs"), legend("decode", "time to first token, of each answer when it ended"), legend("cached", "its whole time")), this.outputs));
    this.parameters = {};
    this.reset();
    new ResizeObserver(() => this.draw()).observe(root);
    addEventListener("theme-changed", () => this.draw());
  }

  enter() {
    if (!this.time) this.ask(1);
    this.timer = setInterval(() => { if (this.running) this.ask(); }, TICK);
  }

  leave() { clearInterval(this.timer); this.setRunning(false); }

  reset() {
    this.time = 0;
    this.changes = [];
    this.history = new History();
    this.requests = new Map(); // id: { sent, first, end }
    this.queue = []; // [time, how many wait]
    this.kpis = null;
    this.run_number = (this.run_number ?? 0) + 1;
  }

  begin(parameters = { ...this.parameters, ...this.current }) {
    this.parameters = parameters;
    this.current = {};
    this.reset();
    this.ask(1);
  }

  change(name, value) {
    this.current = { ...this.current, [name]: value };
    const last = this.changes.at(-1);
    if (last?.at === this.time) last.parameters[name] = value;
    else this.changes.push({ at: this.time, parameters: { [name]: value } });
  }

  setRunning(running) {
    this.running = running;
    this.run.textContent = running ? "Pause" : "Run";
  }

  async step() {
    this.setRunning(false);
    await this.pending;
    await this.ask(1);
  }

  // The next piece: as far as time has gone, or so many steps.
  ask(steps = null) {
    this.pending ??= this.fetch(steps).finally(() => { this.pending = null; });
    return this.pending;
  }

  async fetch(steps) {
    const run = this.run_number;
    const until = this.time + (steps ? 60 : (TICK / 1000) * Number(this.speed.value));
    const body = { parameters: this.parameters, changes: this.changes, since: this.time, until, max_steps: steps ?? 100 };
    try {
      const answer = await (await ask("dashboard/simulation", { kind: "admin", body })).json();
      if (run === this.run_number) this.take(answer);
      this.notice.hidden = true;
    } catch (error) {
      this.setRunning(false);
      const wantsKey = error instanceof Refused && error.status === 401;
      this.notice.replaceChildren(error.message, ...(wantsKey ? [" ", h("button", { onclick: () => dispatchEvent(new Event("key-wanted")) }, "Enter a key")] : []));
      this.notice.hidden = false;
    }
    if (run !== this.run_number) await this.fetch(1); // it was begun anew meanwhile
  }

  take({ time, frame, kpis, sent, ended, parameters, presets }) {
    if (presets) this.showPresets(presets);
    record(frame, !this.time);
    this.time = time;
    this.kpis = kpis;
    this.history.push(frame);
    for (const [id, at] of sent) this.requests.set(id, { sent: at });
    for (const [id, at, [first], end, tokens] of ended) this.requests.set(id, { sent: at, first, end, tokens });
    for (const { request_id: id, num_computed_tokens: computed } of frame.running) if (this.requests.has(id)) this.requests.get(id).runs = computed >= 0;
    for (const [id, request] of this.requests) if ((request.end ?? time) < time - 2 * SPAN) this.requests.delete(id);
    this.queue.push([time, frame.num_waiting]);
    this.queue = this.queue.filter(([at]) => at > time - 2 * SPAN);
    for (const [name, { input, show }] of Object.entries(this.inputs)) {
      if (document.activeElement !== input && !(name in (this.current ?? {}))) { input.value = parameters[name]; show(); }
    }
    this.draw();
  }

  showPresets(presets) {
    if (this.presets.children.length) return;
    this.presets.replaceChildren(...Object.entries(presets).map(([name, parameters]) => {
      const [words, lesson] = LESSONS[name] ?? [name, ""];
      return h("button", { title: lesson, onclick: () => { this.lesson.textContent = lesson; this.begin(parameters); this.setRunning(true); } }, words);
    }));
  }

  draw() {
    if (!this.kpis) return;
    const { kpis, time } = this;
    const figure = (name, value, small = "") => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, small)));
    this.clock.textContent = `virtual time ${time.toFixed(3)} s`;
    this.figures.replaceChildren(
      figure("Utilization", `${Math.round(100 * kpis.utilization)} %`), figure("Active", number(kpis.num_running)), figure("Queue", number(kpis.num_waiting)),
      figure("First token", seconds(kpis.ttft_p50 || null), ` p99 ${seconds(kpis.ttft_p99 || null)}`), figure("Throughput", number(kpis.output_tokens_per_second), ` tok/s, ${kpis.request_rate.toFixed(1)} /s`),
      figure("Little’s law", `L ${kpis.num_in_system.toFixed(1)}`, ` λW ${kpis.little.toFixed(1)}`));
    this.figures.title = `L is how many were in the system on average, λ how many left in a second (${kpis.request_rate.toFixed(2)}), W how long each was there (${seconds(kpis.mean_seconds)}). They agree when what comes also leaves.`;
    this.lanes.draw(this.history, this.history.steps.length - 1, null);
    const step = this.lanes.pointed;
    this.words.textContent = step ? explain(step, this.history.steps[this.history.steps.indexOf(step) - 1]) : "Point at a step to have it explained.";
    const every = SPAN / 4;
    const drawBoth = (canvas, most, words, draw) => fit(canvas, (context, width, height) => {
      const colour = colours();
      const floor = height - BOTTOM;
      const place = (at) => width - 4 - ((time - at) / SPAN) * (width - 4 - LEFT);
      const times = Array.from({ length: 5 }, (_, index) => (Math.floor(time / every) - index) * every).filter((at) => at >= 0 && at > time - SPAN);
      context.fillStyle = colour.line;
      for (const y of [TOP, floor]) context.fillRect(LEFT, y, width - LEFT, 0.5);
      for (const at of times) context.fillRect(place(at), TOP, 0.5, floor - TOP);
      draw(context, place, (value) => floor - (value / most) * (floor - TOP), colour);
      drawAxes(context, colour, { height, width, ys: [[TOP, words(most)], [floor - 4, "0"]], xs: times.map((at) => [place(at), `${at} s`]) });
    });
    const waiting = roundUp(Math.max(4, ...this.queue.map(([, count]) => count)));
    drawBoth(this.arrivals, waiting, number, (context, place, y, colour) => {
      context.strokeStyle = colour.faint;
      context.beginPath();
      for (const [at, count] of this.queue.filter(([at]) => at > time - SPAN)) context.lineTo(place(at), y(count));
      context.stroke();
      for (const request of this.requests.values()) {
        if (request.sent < time - SPAN) continue;
        context.fillStyle = request.runs || request.end ? colour.decode : colour.warn;
        context.fillRect(place(request.sent) - 1, TOP + 2, 2, 14);
      }
    });
    const ended = [...this.requests.values()].filter(({ end }) => end > time - SPAN);
    drawBoth(this.outputs, roundUp(Math.max(0.5, ...ended.map(({ sent, end }) => end - sent))), tick, (context, place, y, colour) => {
      for (const { sent, first, end } of ended) {
        const x = place(end);
        context.fillStyle = colour.cached;
        context.fillRect(x - 1, y(end - sent), 3, y(0) - y(end - sent));
        context.fillStyle = colour.decode;
        context.fillRect(x - 2, y((first ?? end) - sent) - 2, 5, 4);
      }
    });
  }
}

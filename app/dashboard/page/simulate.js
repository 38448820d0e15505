// Simulate: the server's own scheduler on a virtual clock. Arrivals above, the active set in the middle, what came out
// below. Every request says all parameters and changes, so the same simulation can be had again at any time.
import { colours, fit, h, number, seconds } from "./dom.js";
import { History } from "./history.js";
import { Lanes } from "./lanes.js";
import { ask, Refused } from "./server.js";
import { legend } from "./view.js";

const TICK = 125; // milliseconds
const SPAN = 20; // virtual seconds that are shown
const SLIDERS = [ // name, words, least, most, step, unit
  ["rate", "Arrivals", 0.5, 20, 0.5, "/s"], ["max_num_seqs", "Most active", 1, 64, 1, ""], ["step_seconds", "A step takes", 0.005, 0.1, 0.005, "s"],
  ["input_len", "Prompt, mean", 8, 1024, 8, "tokens"], ["output_len", "Answer, mean", 4, 256, 4, "tokens"], ["max_num_batched_tokens", "Budget of a step", 256, 2048, 64, "tokens"],
];
const LESSONS = { comfortable: "3/s, 8 slots: comfortable", overloaded: "8/s, 4 slots: grows without bound", "one slot": "2/s, 1 slot: p99 hurts" };

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
    this.lanes = new Lanes(this.active, () => {}, 22);
    root.append(this.notice,
      h("div.panel", {}, h("div.bar.controls", {}, this.presets, h("span.spacer"), this.clock, this.speed, h("button", { onclick: () => this.step() }, "One step"), h("button", { onclick: () => this.begin() }, "Begin anew"), this.run), sliders),
      this.figures,
      h("div.panel", {}, h("div.bar", {}, h("h2", {}, "Arrivals"), legend("decode", "running or done"), legend("warn", "waiting"), legend("faint", "how many wait")), this.arrivals),
      h("div.panel", {}, h("div.bar", {}, h("h2", {}, "Active set"), legend("prefill", "prefill"), legend("decode", "decode")), this.active),
      h("div.panel", {}, h("div.bar", {}, h("h2", {}, "Outputs"), legend("decode", "time to first token, of each answer when it ended"), legend("cached", "its whole time")), this.outputs));
    this.parameters = {};
    this.reset();
    new ResizeObserver(() => this.draw()).observe(root);
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
    this.presets.replaceChildren(...Object.entries(presets).map(([name, parameters]) => h("button", { onclick: () => { this.begin(parameters); this.setRunning(true); } }, LESSONS[name] ?? name)));
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
    const place = (at, width) => width - ((time - at) / SPAN) * width;
    fit(this.arrivals, (context, width, height) => {
      const colour = colours();
      const most = Math.max(4, ...this.queue.map(([, count]) => count));
      context.strokeStyle = colour.faint;
      context.beginPath();
      for (const [at, count] of this.queue) context.lineTo(place(at, width), height - 2 - (count / most) * (height - 26));
      context.stroke();
      for (const request of this.requests.values()) {
        context.fillStyle = request.runs || request.end ? colour.decode : colour.warn;
        context.fillRect(place(request.sent, width) - 1, 2, 2, 14);
      }
    });
    fit(this.outputs, (context, width, height) => {
      const colour = colours();
      const ended = [...this.requests.values()].filter(({ end }) => end > time - SPAN);
      const most = Math.max(0.5, ...ended.map(({ sent, end }) => end - sent));
      context.fillStyle = colour.text;
      context.font = "11px system-ui";
      context.fillText(seconds(most), 2, 11);
      for (const { sent, first, end } of ended) {
        const x = place(end, width);
        context.fillStyle = colour.cached;
        context.fillRect(x - 1, height - ((end - sent) / most) * (height - 4), 3, ((end - sent) / most) * (height - 4));
        context.fillStyle = colour.decode;
        context.fillRect(x - 2, height - 2 - (((first ?? end) - sent) / most) * (height - 6), 5, 4);
      }
    });
  }
}

// What frames show, for live and for play: figures, lanes, queue, blocks, and one request.
import { drawBlocks } from "./blocks.js";
import { span } from "./axes.js";
import { h, number, quantile, seconds } from "./dom.js";
import { History } from "./history.js";
import { explain, Lanes } from "./lanes.js";

const HINT = "Choose a request to see its timeline and why it waits.";
const POINT = "Point at a step, or go through them with ← and →, to have one explained.";
const ENDS = { stop: "ended", length: "reached the length limit", abort: "aborted", error: "failed", timeout: "timed out", gone: "has left", preempted: "preempted" };

export class View {
  // `abort(id)` ends a request; a recording has none.
  constructor(root, abort = null) {
    this.abort = abort;
    this.histories = new Map(); // by engine
    this.engine = 0;
    this.cursor = null; // index of the step that is shown; null: the latest
    this.selected = null;
    this.tenant = null; // the one whose requests are listed; null: all
    this.figures = h("dl.figures");
    this.canvas = h("canvas.lanes", { role: "img", ariaLabel: "Requests of the last steps" });
    this.lanes = new Lanes(this.canvas, (id) => this.select(id));
    this.lanes.onPoint = () => this.drawSoon();
    this.words = h("p.explained");
    this.pause = h("button", { onclick: () => this.hold(this.cursor === null ? this.last : null) }, "Pause");
    this.slider = h("input", { type: "range", min: 0, max: 0, value: 0, ariaLabel: "Step", oninput: () => this.hold(Number(this.slider.value)) });
    this.where = h("span.where");
    this.aim = legend("aim", "");
    this.engines = h("select", { ariaLabel: "Engine", hidden: true, onchange: () => { this.engine = Number(this.engines.value); this.hold(null); } });
    this.queue = h("div.queue");
    this.blocks = h("canvas.blocks", { role: "img", ariaLabel: "KV blocks" });
    this.blockWords = h("p.legend");
    this.reasons = h("p.reasons");
    this.running = h("ul.requests", { ariaLabel: "Running" });
    this.waiting = h("ul.requests", { ariaLabel: "Waiting" });
    this.listed = h("p.faint");
    this.details = h("div", {}, h("p.faint", {}, HINT));
    this.end = h("button", { hidden: true, onclick: () => this.askToEnd() }, "Abort");
    this.said = h("p.faint", { role: "status" });
    root.append(
      this.figures,
      h("div.panel.wide", {},
        h("div.bar", {}, h("h2", {}, "Steps"), legend("decode", "decode"), legend("prefill", "prefill"), legend("warn", "preempted"), legend("bad", "aborted, failed"), this.aim, h("span.spacer"), this.engines, this.where,
          h("button", { onclick: () => this.move(-1), title: "One step back (←)", ariaLabel: "One step back" }, "‹"), this.slider, h("button", { onclick: () => this.move(1), title: "One step on (→)", ariaLabel: "One step on" }, "›"), this.pause),
        this.canvas, this.words),
      h("div.columns", {},
        h("div.panel", {}, h("h2", {}, "Requests"), this.queue, this.running, this.waiting, this.listed),
        h("div.panel", {}, h("h2", {}, "One request"), h("div.details", {}, this.details, this.end, this.said), h("h2", {}, "Finished and refused"), this.reasons),
        h("div.panel", {}, h("h2", {}, "KV blocks"), this.blocks, this.blockWords)),
    );
    root.addEventListener("keydown", (event) => {
      if (event.target.matches("input, textarea, select")) return;
      if (event.key === "ArrowLeft") this.move(-1);
      else if (event.key === "ArrowRight") this.move(1);
      else if (event.key === " " && !event.target.matches("button")) this.pause.click();
      else return;
      event.preventDefault();
    });
    new ResizeObserver(() => this.draw()).observe(root);
    addEventListener("theme-changed", () => this.drawSoon());
  }

  get history() { return this.histories.get(this.engine); }
  get last() { return (this.history?.steps.length ?? 0) - 1; }

  push(frame) {
    if (!this.histories.has(frame.engine)) {
      this.histories.set(frame.engine, new History());
      this.engines.append(h("option", { value: frame.engine }, `engine ${frame.engine}`));
      this.engines.hidden = this.histories.size < 2;
    }
    if (frame.engine === this.engine && this.cursor !== null) { // what is looked at stays where it is
      const shown = this.history.steps[this.cursor];
      this.histories.get(frame.engine).push(frame);
      this.cursor = Math.max(0, this.history.steps.indexOf(shown));
    } else {
      this.histories.get(frame.engine).push(frame);
    }
    this.drawSoon();
  }

  clear() {
    this.histories.clear();
    this.engines.replaceChildren();
    this.cursor = this.selected = null;
  }

  hold(cursor) { this.cursor = cursor; this.drawSoon(); }
  move(by) { this.hold(Math.max(0, Math.min(this.last, (this.cursor ?? this.last) + by))); }
  select(id) {
    this.selected = this.selected === id ? null : id;
    this.isAskedTwice = false;
    this.said.textContent = "";
    this.drawSoon();
  }

  async askToEnd() {
    if (!this.isAskedTwice) {
      this.isAskedTwice = true;
      this.drawSoon();
      return;
    }
    this.isAskedTwice = false;
    try {
      await this.abort(this.selected);
    } catch (error) {
      this.said.textContent = error.message;
    }
    this.drawSoon();
  }

  drawSoon() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.draw(); });
  }

  draw() {
    const { history } = this;
    if (!history) return;
    const end = this.cursor ?? this.last;
    const step = history.steps[end];
    const frame = this.cursor === null ? history.frame : step?.frame ?? history.frame;
    this.slider.max = Math.max(0, this.last);
    this.slider.value = end;
    this.pause.textContent = this.cursor === null ? "Pause" : "Resume";
    this.where.textContent = step ? `step ${step.step}${this.cursor === null ? "" : ` · ${step.rows.length} requests · ${seconds(step.seconds)}`}` : "no step yet";
    this.aim.lastChild.textContent = `aimed at ${seconds(frame.limits.target_inter_token_latency)}`;
    const request = this.selected && history.requests.get(this.selected);
    if (!request) this.selected = null;
    // A request that has left dims no others, but where one looks back.
    const isHere = request && (request.lane !== null || this.cursor !== null || frame.waiting.some((each) => each.request_id === request.id));
    this.lanes.draw(history, end, isHere ? this.selected : null);
    this.drawWords(history, step);
    // The rates of an engine that has nothing to do fall to none, and those of a long step stay.
    const isIdle = this.cursor === null && !frame.num_running;
    this.drawFigures(history.figures(isIdle ? frame.time : step?.time), frame);
    this.drawRequests(frame);
    drawBlocks(this.blocks, frame.blocks);
    this.drawBlockWords(frame.blocks);
    this.drawDetails(request, frame);
    const left = [...history.left].map(([why, count]) => `${number(count)} ${ENDS[why] ?? why}`);
    const refused = [...history.refused].map(([why, count]) => `${number(count)} refused: ${why.replaceAll("_", " ")}`);
    this.reasons.textContent = [...left, ...refused].join(" · ") || "None since this page was opened.";
  }

  drawFigures(figures, frame) {
    const { num_owned: owned, num_cached: cached, num_free: free } = frame.blocks;
    const figure = (name, value, small = "") => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, small)));
    const both = (pair) => [seconds(pair?.[0]), ` p99 ${seconds(pair?.[1])}`];
    this.figures.replaceChildren(
      figure("Running", number(frame.num_running), ` of ${frame.limits.max_num_seqs}`),
      figure("Waiting", number(frame.num_waiting), frame.oldest_wait ? ` oldest ${span(frame.oldest_wait)}` : ""),
      figure("Decode", number(figures.decode ?? 0), " tok/s"),
      figure("Prefill", number(figures.prefill ?? 0), " tok/s"),
      figure("Step", seconds(figures.step), figures.steps ? ` ${number(figures.steps)}/s` : ""),
      figure("First token", ...both(figures.ttft)),
      figure("Between tokens", ...both(figures.itl)),
      figure("KV owned", `${Math.round((100 * owned) / (owned + cached + free || 1))} %`),
    );
  }

  // The step under the pointer, else the one where the view was stopped.
  drawWords(history, shown) {
    const step = this.lanes.pointed ?? (this.cursor === null ? null : shown);
    const before = step && history.steps[history.steps.indexOf(step) - 1];
    this.words.textContent = step ? explain(step, before, history.frame.limits.target_inter_token_latency) : POINT;
  }

  drawRequests(frame) {
    const most = Math.max(1, ...frame.tenants.map((tenant) => tenant.num_running + tenant.num_waiting));
    if (!frame.tenants.some(({ tenant }) => tenant === this.tenant)) this.tenant = null;
    this.fill(this.queue, frame.tenants.slice(0, 12), ({ tenant }) => tenant, ({ tenant }) => {
      const choose = () => { this.tenant = this.tenant === tenant ? null : tenant; this.drawSoon(); };
      return h("div", {}, h("button.tenant", { onclick: choose, title: "Show only this tenant's requests" },
        h("span.name", {}, tenant || "anonymous"), h("span.track", {}, h("span.share.runs"), h("span.share.waits")), h("span.counts")));
    }, (row, { tenant, num_running: runs, num_waiting: waits }) => {
      const [, track, counts] = row.firstChild.children;
      track.firstChild.style.width = `${(100 * runs) / most}%`;
      track.lastChild.style.width = `${(100 * waits) / most}%`;
      counts.textContent = `${runs} running, ${waits} waiting`;
      row.firstChild.setAttribute("aria-pressed", this.tenant === tenant);
    });
    const several = frame.tenants.length > 1 && this.tenant === null;
    const of = (requests) => requests.filter(({ tenant }) => this.tenant === null || tenant === this.tenant);
    this.fillRequests(this.running, of(frame.running), progress, several);
    this.fillRequests(this.waiting, of(frame.waiting), (request) => `${request.waits_for ?? ""}, ${span(frame.time - request.arrival_time)}`, several);
    const [given, all] = [frame.running.length + frame.waiting.length, frame.num_running + frame.num_waiting];
    this.listed.textContent = given < all ? `The first ${given} of ${all} requests.` : all ? "" : "No request at the moment.";
  }

  fillRequests(list, requests, words, withTenant) {
    const key = ({ request_id: id }) => id;
    const make = ({ request_id: id }) => h("li", {}, h("button.request", { onclick: () => this.select(id) }, h("code", {}, id), h("span")));
    this.fill(list, requests, key, make, (row, request) => {
      row.firstChild.lastChild.textContent = `${withTenant ? `${request.tenant || "anonymous"} · ` : ""}${words(request)}`;
      row.firstChild.setAttribute("aria-pressed", request.request_id === this.selected);
    });
  }

  // Rows are kept while what they show is there, so that a click or the focus does not fall between two frames.
  fill(list, items, key, make, update) {
    const rows = new Map([...list.children].map((row) => [row.dataset.key, row]));
    items.forEach((item, index) => {
      const id = key(item);
      let row = rows.get(id);
      rows.delete(id);
      if (!row) {
        row = make(item);
        row.dataset.key = id;
      }
      update(row, item);
      if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null);
    });
    for (const row of rows.values()) row.remove();
  }

  drawBlockWords(blocks) {
    const shared = Object.entries(blocks.by_ref_count).reduce((sum, [owners, count]) => sum + (owners > 1 ? count : 0), 0);
    const groups = new Set([...blocks.map.toLowerCase()].filter((state) => state >= "a" && state <= "z"));
    this.blockWords.replaceChildren(
      legend("owned", `${number(blocks.num_owned)} owned`), legend("shared-mark", `${number(shared)} of them shared`), legend("cached", `${number(blocks.num_cached)} cached`), legend("free", `${number(blocks.num_free)} free`),
      ...(groups.size > 1 ? [legend("group2", "second group"), legend("group3", "third group")].slice(0, groups.size - 1) : []),
      ...(blocks.map_stride > 1 ? [` · one cell in ${blocks.map_stride} blocks`] : []));
  }

  drawDetails(request, frame) {
    const isThere = request && [...frame.running, ...frame.waiting].some((each) => each.request_id === request.id);
    this.end.hidden = !this.abort || !isThere || this.cursor !== null;
    this.end.textContent = this.isAskedTwice ? "Abort it, really" : "Abort";
    this.end.classList.toggle("danger", Boolean(this.isAskedTwice));
    if (!request) {
      this.details.replaceChildren(h("p.faint", {}, HINT));
      return;
    }
    const now = [...frame.running, ...frame.waiting].find((each) => each.request_id === request.id);
    const facts = now ?? request.facts;
    const rows = [["Id", request.id]];
    const ended = request.ends.at(-1);
    if (facts) {
      rows.push(["Tenant", facts.tenant || "anonymous"], ["Prompt", `${facts.num_prompt_tokens} tokens, ${facts.num_cached_tokens} of them cached`]);
      rows.push(["Output", `${facts.num_output_tokens} tokens`], ["Blocks", `${facts.num_blocks}`]);
      if (facts.num_preemptions) rows.push(["Preempted", `${facts.num_preemptions} times`]);
    }
    if (now) rows.push(["State", now.waits_for ? `waits: ${now.waits_for}, for ${span(frame.time - now.arrival_time)}` : `${now.status}, here for ${span(frame.time - now.arrival_time)}`]);
    else if (ended) rows.push(["State", ENDS[ended.why] ?? ended.why]);
    this.details.replaceChildren(h("dl.facts", {}, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])), timeline(request, facts?.arrival_time));
  }
}

function progress(request) {
  const done = request.num_computed_tokens;
  return done < request.num_prompt_tokens ? `prefill ${done} of ${request.num_prompt_tokens}` : `${request.num_output_tokens} token${request.num_output_tokens === 1 ? "" : "s"}`;
}

export function legend(kind, words) {
  return h("span.key", {}, h(`i.${kind}`), h("span", {}, words));
}

// What the steps tell of it: how long it waited, its prefill, and its tokens.
function timeline(request, arrival) {
  const { steps } = request;
  if (!steps.length) return h("p.faint", {}, "It has not run yet.");
  const begin = arrival && arrival <= steps[0].time ? arrival : steps[0].time;
  const end = steps.at(-1).time + steps.at(-1).seconds;
  const parts = [{ kind: "waits", from: begin, to: steps[0].time }];
  for (const step of steps) {
    const kind = step.prefills ? "prefill" : "decode";
    const last = parts.at(-1);
    if (last.kind === kind && step.time - last.to < 0.002 + (last.to - last.from) * 0.02) last.to = step.time + step.seconds;
    else {
      if (step.time - last.to > 1e-6 && last.kind !== "waits") parts.push({ kind: "waits", from: last.to, to: step.time });
      parts.push({ kind, from: step.time, to: step.time + step.seconds });
    }
  }
  const track = h("div.timeline");
  for (const { kind, from, to } of parts) {
    const part = h(`span.${kind}`, { title: `${kind} ${seconds(to - from)}` });
    part.style.left = `${(100 * (from - begin)) / (end - begin || 1)}%`;
    part.style.width = `${(100 * (to - from)) / (end - begin || 1)}%`;
    track.append(part);
  }
  const sum = (kind) => parts.filter((part) => part.kind === kind).reduce((total, part) => total + part.to - part.from, 0);
  const gaps = steps.filter((step) => step.sampled).map((step) => step.time + step.seconds).map((time, index, all) => time - all[index - 1]).slice(1).sort((a, b) => a - b);
  return h("div", {}, track, h("p.faint", {}, `waited ${seconds(sum("waits"))}, prefill ${seconds(sum("prefill"))}, decode ${seconds(sum("decode"))}; between tokens ${seconds(quantile(gaps, 0.5))}, p99 ${seconds(quantile(gaps, 0.99))}`));
}

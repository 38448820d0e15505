// What frames have told, for the last steps: lanes, requests and figures. Frames are described in frames.py.
import { quantile } from "./dom.js";

const MOST_STEPS = 600;
const MOST_FIRST_TOKENS = 1000;
const WINDOW = 10; // seconds of which rates and latencies tell

export class History {
  constructor() {
    this.steps = []; // the last ones, oldest first, each with the frame that told of it
    this.requests = new Map(); // by id: what is known of it
    this.lanes = []; // who has the lane, by its number
    this.firstTokens = []; // [time, seconds]
    this.left = new Map(); // how many left, by reason
    this.refused = new Map();
    this.frame = null; // the latest
  }

  push(frame) {
    // An engine that was started again counts from the beginning.
    if (this.frame && frame.time < this.frame.time) Object.assign(this, new History());
    this.frame = frame;
    for (const request of [...frame.running, ...frame.waiting]) {
      const known = this.known(request.request_id);
      known.latest = request;
      known.told = frame.time;
    }
    for (const step of frame.steps) {
      const ids = (list) => list.map(([index, ...rest]) => [frame.requests[index], ...rest]);
      this.take({ ...step, rows: ids(step.rows), left: ids(step.left), frame });
    }
    this.leaveUnseen(frame);
    for (const each of frame.service?.first_tokens ?? []) this.firstTokens.push([frame.time, each]);
    this.firstTokens = this.firstTokens.slice(-MOST_FIRST_TOKENS);
    for (const [why, count] of Object.entries(frame.service?.refused ?? {})) {
      this.refused.set(why, (this.refused.get(why) ?? 0) + count);
    }
    this.forget();
  }

  take(step) {
    step.lanes = [];
    const ran = new Set(step.rows.map(([id]) => id));
    this.leave(step, step.left.filter(([id]) => !ran.has(id))); // before others take their lanes
    for (const [id, tokens, sampled] of step.rows) {
      const request = this.known(id);
      if (request.lane === null) {
        const free = this.lanes.indexOf(undefined);
        request.lane = free < 0 ? this.lanes.length : free;
        this.lanes[request.lane] = id;
      }
      const prefills = tokens > sampled;
      step.lanes.push({ lane: request.lane, id, tokens, sampled, prefills });
      request.steps.push({ time: step.time, seconds: step.seconds, tokens, sampled, prefills });
      request.seen = step.step;
      if (request.steps.length > 2 * MOST_STEPS) request.steps = request.steps.slice(-MOST_STEPS);
    }
    this.leave(step, step.left.filter(([id]) => ran.has(id)));
    this.steps.push(step);
  }

  leave(step, left) {
    for (const [id, why] of left) {
      this.left.set(why, (this.left.get(why) ?? 0) + 1);
      const request = this.known(id);
      request.ends.push({ time: step.time + step.seconds, why });
      request.seen = step.step;
      step.lanes.push({ lane: request.lane, id, left: why });
      if (request.lane !== null) this.lanes[request.lane] = undefined;
      request.lane = null;
      if (why !== "preempted") request.latest = null;
    }
  }

  // An engine whose steps are very short makes more of them between two frames than its snapshots hold, so that no frame
  // may have the one with which a request left.
  leaveUnseen(frame) {
    if (!frame.steps.length || frame.running.length < frame.num_running || frame.waiting.length < frame.num_waiting) return;
    const there = new Set([...frame.running, ...frame.waiting].map((request) => request.request_id));
    for (const request of this.requests.values()) {
      request.missed = request.lane === null || there.has(request.id) ? 0 : request.missed + 1;
      if (request.missed < 2) continue; // the next step says why it left
      this.lanes[request.lane] = undefined;
      request.lane = request.latest = null;
      request.ends.push({ time: frame.time, why: "gone" });
    }
  }

  known(id) {
    if (!this.requests.has(id)) this.requests.set(id, { id, lane: null, steps: [], ends: [], latest: null, facts: null, seen: 0, missed: 0 });
    const request = this.requests.get(id);
    request.facts = request.latest ?? request.facts;
    return request;
  }

  forget() {
    if (this.steps.length > MOST_STEPS) this.steps = this.steps.slice(-MOST_STEPS);
    const oldest = this.steps[0]?.step ?? 0;
    for (const [id, request] of this.requests) {
      if (request.seen < oldest && request.lane === null && request.told !== this.frame.time) this.requests.delete(id);
    }
  }

  // Figures of the last seconds before `end`, of what is kept.
  figures(end = this.steps.at(-1)?.time ?? 0) {
    const recent = this.steps.filter((step) => step.time > end - WINDOW && step.time <= end);
    if (!recent.length) return { span: 0 };
    const span = Math.max(recent.at(-1).time + recent.at(-1).seconds - recent[0].time, end - recent[0].time, 1e-9);
    // An engine whose steps are very short has made some that no frame told of.
    const share = recent.length / Math.max(recent.at(-1).step - recent[0].step + 1, 1);
    const [gaps, last] = [[], new Map()];
    let [prefill, decode] = [0, 0];
    for (const step of recent) {
      const ended = step.time + step.seconds;
      for (const [id, tokens, sampled] of step.rows) {
        if (tokens > sampled) prefill += tokens;
        else decode += tokens;
        if (!sampled) continue;
        const [before, number] = last.get(id) ?? [];
        if (step.step - number <= 2) gaps.push(ended - before);
        last.set(id, [ended, step.step]);
      }
    }
    gaps.sort((a, b) => a - b);
    const first = this.firstTokens.filter(([time]) => time > end - 60 && time <= end + WINDOW).map(([, value]) => value).sort((a, b) => a - b);
    const durations = recent.map((step) => step.seconds).sort((a, b) => a - b);
    return {
      span, prefill: prefill / span / share, decode: decode / span / share, steps: recent.length / span / share,
      step: quantile(durations, 0.5), itl: [quantile(gaps, 0.5), quantile(gaps, 0.99)], ttft: [quantile(first, 0.5), quantile(first, 0.99)],
    };
  }
}

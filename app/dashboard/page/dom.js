// Elements without HTML: text is always text.

// h("button.primary", { onclick }, "Send"): functions become listeners, the rest attributes or properties.
export function h(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const seconds = (value) =>
  value === null || value === undefined || Number.isNaN(value) ? "–"
    : value < 0.0995 ? `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`
    : value < 100 ? `${value.toFixed(value < 9.95 ? 2 : 1)} s` : `${Math.round(value)} s`;

export const number = (value) =>
  value === null || value === undefined ? "–" : value >= 9999.5 ? `${(value / 1000).toFixed(1)} k` : value >= 99.5 ? value.toFixed(0) : value.toFixed(value % 1 ? 1 : 0);

// A quantile of sorted values, linear between neighbours; null of none.
export function quantile(sorted, share) {
  if (!sorted.length) return null;
  const place = share * (sorted.length - 1);
  const below = Math.floor(place);
  return sorted[below] + ((sorted[below + 1] ?? sorted[below]) - sorted[below]) * (place - below);
}

// A canvas as large as its place, in device pixels; `draw(context, width, height)` in CSS pixels.
export function fit(canvas, draw) {
  const { width, height } = canvas.getBoundingClientRect();
  if (!width || !height) return;
  const scale = devicePixelRatio || 1;
  const [w, hh] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== hh) [canvas.width, canvas.height] = [w, hh];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  draw(context, width, height);
}

// The colours of the style sheet, which knows light from dark.
export function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(
    ["text", "faint", "line", "surface", "prefill", "decode", "warn", "bad", "cached", "shared", "owned", "group2", "group3"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
  );
}

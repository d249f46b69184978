// Numbers and states in words, and small helpers for elements.

export const $ = (id) => document.getElementById(id);

/** Makes an element: h("p", { class: "soft" }, "text", child). Text is always text, never markup. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** Writes text into an element and hides it when there is none. */
export function say(element, text) {
  element.textContent = text || "";
  element.hidden = !text;
}

let announced = "";
/** Says a sentence to screen readers, once. */
export function announce(text) {
  if (text !== announced) $("live").textContent = announced = text;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${unit === 0 || count >= 100 ? Math.round(count) : count.toPrecision(3)} ${units[unit]}`;
}

export function seconds(value) {
  if (value < 0.995) return `${value.toFixed(2)} s`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  const rest = String(whole % 60).padStart(2, "0");
  return whole < 3600 ? `${Math.floor(whole / 60)}:${rest} min`
    : `${Math.floor(whole / 3600)}:${String(Math.floor(whole / 60) % 60).padStart(2, "0")}:${rest} h`;
}

export const number = (value) => value.toLocaleString("en", { useGrouping: true });

export function ordinal(value) {
  const tens = value % 100;
  const end = tens >= 11 && tens <= 13 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[value % 10] || "th";
  return `${number(value)}${end}`;
}

export function waiting(position) {
  if (position == null) return "Waiting";
  return position <= 1 ? "Next in the queue" : `${ordinal(position)} in the queue`;
}

const STATES = { queued: "waiting", in_progress: "running", completed: "done", failed: "failed", cancelled: "cancelled" };
export const state = (job) => STATES[job.status] || job.status;

export const stepText = (job) => (job.steps ? `Step ${number(job.step || 0)} of ${number(job.steps)}` : "Running");

/** How long a job ran so far, in seconds, or null before its start. Times of day are whole seconds, so `seconds` wins. */
export function elapsed(job) {
  if (job.seconds != null) return job.seconds;
  if (!job.started_at) return null;
  return Math.max(0, (job.completed_at || Date.now() / 1000) - job.started_at);
}

export function difference(value) {
  if (value === 0) return "0";
  return value < 0.001 ? value.toExponential(1).replace("e-", " × 10⁻").replace(/⁻(\d+)$/, (_, d) => "⁻" + raised(d))
    : value.toPrecision(2);
}

const raised = (digits) => [...digits].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");

export const decibel = (value) => (value >= 999 ? "infinite" : `${value.toFixed(1)} dB`);

const CLASSES = {
  exact: "This strategy is exact: it differs from its serial twin by rounding only.",
  bounded: "This strategy is bounded: it comes with a certificate of how far it may differ from its serial twin.",
  approximate: "This strategy is approximate: its pictures may differ from their serial twins.",
};

/** What the comparison showed, from its numbers: how far apart the two are, and which was sooner. */
export function verdict(job, pace = null) {
  const parts = [];
  if (job.max_abs_diff === 0) parts.push("Every pixel is equal.");
  parts.push(CLASSES[job.class] || "");
  if (job.class === "approximate" && job.psnr_to_serial != null) {
    parts.push(job.psnr_to_serial >= 40 ? "Here the difference is hard to see."
      : job.psnr_to_serial >= 25 ? "Here the difference can be seen where one looks for it." : "Here it is another picture.");
  }
  if (pace != null && pace < 1) parts.push("It was slower than one worker: a model this small computes less than its workers tell each other.");
  return parts.filter(Boolean).join(" ");
}

/** The facts of a job on one line. */
export function facts(job) {
  const parts = [job.model, job.strategy === "serial" ? "serial" : job.strategy, job.class && job.strategy !== "serial" ? job.class : null];
  if (job.size) parts.push(job.size.replace("x", " × "));
  if (job.steps) parts.push(`${number(job.steps)} steps`);
  if (job.seed != null) parts.push(`seed ${job.seed}`);
  return parts.filter(Boolean).join(" · ");
}

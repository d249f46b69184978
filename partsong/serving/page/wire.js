// What goes over the wire: requests with the user's key, errors as sentences, and event streams.

const KEY = "partsong-key";
/** Path under which a proxy shows the server; empty without one. */
const ROOT = new URL("..", import.meta.url).pathname.replace(/\/$/, "");

/** Returns the address of a path of the server. */
export const here = (path) => ROOT + path;

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** An answer that is not a success. `status` is 0 where the server did not answer at all. */
export class Fault extends Error {
  constructor(message, status = 0) {
    super(message.charAt(0).toUpperCase() + message.slice(1));
    this.status = status;
  }
}

/** Sends a request and returns the response, or throws a Fault with the server's own sentence. */
export async function open(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(here(path), { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Fault("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw new Fault(await sentence(response), response.status);
  return response;
}

export async function call(path, options) {
  return (await open(path, options)).json();
}

async function sentence(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    if (body.missing) return `Not ready: ${body.missing.join("; ")}.`;
    const { message } = body.error;
    const wait = response.headers.get("Retry-After");
    return wait ? `${message} (Try again in ${wait} s.)` : message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  }
}

/** Yields {event, data} for each event of a text/event-stream. EventSource cannot send a key, so this reads a fetch. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(broken);
      if (done) return;
      rest += value;
      // A carriage return at the end may be half of a line end, so it waits for the next piece.
      const held = rest.endsWith("\r") ? 1 : 0;
      const blocks = rest.slice(0, rest.length - held).replace(/\r\n?/g, "\n").split("\n\n");
      rest = blocks.pop() + rest.slice(rest.length - held);
      for (const block of blocks) {
        const found = parse(block);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function broken(error) {
  throw error.name === "AbortError" ? error : new Fault("The connection to the server was lost.");
}

function parse(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue; // a comment, sent to keep the connection alive
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (line.startsWith("event:")) event = value;
    if (line.startsWith("data:")) data.push(value);
  }
  return data.length ? { event, data: data.join("\n") } : null;
}

export const isFinal = (job) => ["completed", "failed", "cancelled"].includes(job.status);

/**
 * Follows a job to its end. When the connection is lost it is opened again, later each time; `onLost` hears of it.
 */
export async function follow(id, { onJob, onPreview = () => {}, onLost = () => {}, signal }) {
  for (let attempt = 0; !signal.aborted; attempt += 1) {
    try {
      const response = await open(`/v1/jobs/${encodeURIComponent(id)}/events`, { signal });
      for await (const { event, data } of events(response)) {
        attempt = 0;
        if (signal.aborted) return;
        if (event === "preview") onPreview(JSON.parse(data));
        if (event === "job") {
          const job = JSON.parse(data);
          onJob(job);
          if (isFinal(job)) return;
        }
      }
    } catch (fault) {
      if (fault.name === "AbortError") return;
      if (fault.status >= 400 && fault.status < 500) throw fault;
    }
    if (signal.aborted) return;
    onLost();
    await pause(Math.min(8000, 500 * 2 ** attempt), signal);
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}

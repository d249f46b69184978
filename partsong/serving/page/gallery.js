// The jobs of this server, newest first. They live in its journal, so they are here again after a reload.

import { call, isFinal } from "./wire.js";
import { picture, player, show } from "./media.js";
import { $, h, state, waiting } from "./words.js";

const PAGE = 24;
const POLL = 4000;

export class Gallery {
  /** `onFault` gets what went wrong while listing. */
  constructor({ onFault }) {
    this.onFault = onFault;
    this.jobs = new Map();
    this.tiles = new Map();
    this.order = new Map(); // larger is newer, for jobs of the same second
    this.newest = this.oldest = 0;
    this.last = null;
    $("older").addEventListener("click", () => this.older());
    document.addEventListener("visibilitychange", () => this.poll());
  }

  /** Lists the newest jobs again. Those already shown keep their tiles. */
  async refresh() {
    const { data, has_more: more } = await call(`/v1/jobs?limit=${PAGE}`);
    for (const job of [...data].reverse()) this.remember(job);
    if (this.last === null) this.place(data, more);
    this.render();
    this.poll();
    return data;
  }

  async older() {
    try {
      const { data, has_more: more } = await call(`/v1/jobs?limit=${PAGE}&after=${encodeURIComponent(this.last)}`);
      for (const job of data) {
        if (!this.order.has(job.id)) this.order.set(job.id, (this.oldest -= 1));
        this.remember(job);
      }
      this.place(data, more);
      this.render();
      this.tiles.get(data.find((job) => this.tiles.has(job.id))?.id)?.querySelector("a").focus();
    } catch (fault) {
      this.onFault(fault);
    }
  }

  remember(job) {
    if (!this.order.has(job.id)) this.order.set(job.id, (this.newest += 1));
    this.jobs.set(job.id, job);
  }

  place(data, more) {
    this.last = data.length ? data[data.length - 1].id : this.last;
    $("older").hidden = !more;
  }

  /** Takes news of one job without asking the server. */
  put(job) {
    const known = this.jobs.get(job.id);
    this.remember(job);
    if (known && known.status === job.status && known.outputs.length === job.outputs.length) this.fill(job);
    else this.render();
    this.poll();
  }

  /** Asks again while something runs that this page does not follow itself, such as another client's job. */
  poll() {
    if (this.timer || document.hidden || ![...this.jobs.values()].some((job) => !isFinal(job))) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.refresh().catch(() => this.poll());
    }, POLL);
  }

  mark(id) {
    this.current = id;
    for (const [at, tile] of this.tiles) tile.firstChild.setAttribute("aria-current", String(at === id));
  }

  render() {
    const hidden = (job) => job.kind === "chat" || (job.twin_of && this.jobs.has(job.twin_of));
    const listed = [...this.jobs.values()].filter((job) => !hidden(job))
      .sort((a, b) => b.created_at - a.created_at || this.order.get(b.id) - this.order.get(a.id));
    const wanted = new Set(listed.map((job) => job.id));
    for (const [id, tile] of this.tiles) if (!wanted.has(id)) { tile.remove(); this.tiles.delete(id); }
    listed.forEach((job, index) => {
      if (!this.tiles.has(job.id)) this.tiles.set(job.id, this.tile(job));
      const tile = this.tiles.get(job.id);
      if ($("tiles").children[index] !== tile) $("tiles").insertBefore(tile, $("tiles").children[index] || null);
      this.fill(job);
    });
    $("gallery").hidden = !listed.length;
    if (!listed.length && $("stage").hidden) $("empty").hidden = false;
  }

  tile(job) {
    const box = h("span", { class: "thumb" });
    return h("li", {}, h("a", { href: `#job=${job.id}`, class: "tile", "aria-current": String(job.id === this.current) },
      box, h("span", { class: "line" }), h("span", { class: "sub" })));
  }

  fill(job) {
    const tile = this.tiles.get(job.id);
    if (!tile) return;
    const [box, line, sub] = tile.firstChild.children;
    tile.firstChild.dataset.class = job.strategy === "serial" ? "serial" : job.class || "";
    tile.firstChild.dataset.status = job.status;
    line.textContent = job.prompt || "(no prompt)";
    sub.textContent = job.status === "completed" ? [job.strategy, job.n > 1 ? `${job.n} pictures` : null, job.twin ? "with twin" : null]
      .filter(Boolean).join(" · ") : job.status === "in_progress" ? `${Math.round(job.progress || 0)} %` : job.status === "queued"
      ? waiting(job.position).toLowerCase() : state(job);
    const output = job.status === "completed" ? job.outputs[0] : null;
    if (!output) box.textContent = { failed: "!", cancelled: "–" }[job.status] || "";
    else if (output.kind === "video") this.clip(box, output.url);
    else this.still(box, output.url);
  }

  still(box, url) {
    if (!box.querySelector("img")) box.replaceChildren(picture(""));
    show(box.firstChild, url).catch(() => {});
  }

  /** Shows the first frame of a video; it moves while the pointer is on it. */
  clip(box, url) {
    if (box.firstChild?.dataset?.url === url) return;
    const video = player(url, { growing: false, label: "" });
    video.controls = video.autoplay = false;
    video.preload = "metadata";
    video.tabIndex = -1;
    video.removeAttribute("aria-label");
    video.setAttribute("aria-hidden", "true");
    box.replaceChildren(video);
    const tile = box.parentElement;
    tile.addEventListener("pointerenter", () => video.play().catch(() => {}));
    tile.addEventListener("pointerleave", () => video.pause());
  }
}

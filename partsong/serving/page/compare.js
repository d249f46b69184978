// A job beside its serial twin: both results, the map of their differences, and the numbers.

import { call, follow, isFinal } from "./wire.js";
import { picture, player, preview, show } from "./media.js";
import { $, announce, decibel, difference, elapsed, h, say, seconds, state, stepText, verdict, waiting } from "./words.js";

export class Comparison {
  constructor({ onJob, onTwin }) {
    this.onJob = onJob;
    this.onTwin = onTwin;
    $("slide-at").addEventListener("input", () => this.slide());
    this.close();
  }

  close() {
    this.following?.abort();
    this.job = this.twin = this.panes = this.measured = this.asked = null;
    this.index = 0;
    $("twins").hidden = $("slide").hidden = true;
    $("stage").classList.remove("compared");
  }

  choose(index) {
    this.index = index;
    if (this.twin) this.renderPanes();
  }

  /** Shows a job's twin if it has one. `twin` is that job where it is at hand. */
  render(job, twin = null) {
    this.job = job;
    this.measure().catch((fault) => say($("twin-fault"), fault.message));
    if (!job.twin || this.twin?.id === job.twin || this.asked === job.twin) return;
    this.asked = job.twin;
    this.begin(job, twin).catch((fault) => say($("twin-fault"), fault.message)).finally(() => { this.asked = null; });
  }

  async begin(job, twin) {
    const { signal } = (this.following = new AbortController());
    twin = twin || (await call(`/v1/jobs/${encodeURIComponent(job.twin)}`));
    if (signal.aborted) return;
    say($("twin-fault"), "");
    this.lay(job);
    this.update(twin);
    if (!isFinal(twin)) {
      await follow(twin.id, {
        signal,
        onJob: (next) => this.update(next),
        onPreview: ({ index = 0, b64_json: base64 }) => {
          if (index === this.index && !this.twin.outputs.length) preview(this.panes.twin.image, base64);
        },
      });
    }
    if (!signal.aborted) await this.measure();
  }

  lay(job) {
    const pane = (title) => {
      const image = picture(`${job.prompt}, ${title.toLowerCase()}`);
      const frame = h("div", { class: "frame" }, image);
      const [width, height] = (job.size || "1x1").split("x").map(Number);
      frame.style.setProperty("--ratio", `${width} / ${height}`);
      const note = h("span", { class: "soft" });
      return { figure: h("figure", {}, h("figcaption", {}, h("b", {}, title), note), frame), frame, image, note };
    };
    this.panes = { own: pane(job.strategy || "this job"), twin: pane("Serial twin"), map: pane("Difference") };
    this.panes.map.note.textContent = "black is equal, white the largest";
    $("pair").replaceChildren(...Object.values(this.panes).map(({ figure }) => figure));
    $("twins").hidden = false;
    $("stage").classList.toggle("compared", (job.n || 1) === 1);
    $("twin-numbers").replaceChildren();
    say($("twin-sentence"), "");
  }

  update(twin) {
    this.twin = twin;
    if (twin.status === "failed") say($("twin-fault"), twin.error?.message || "The serial twin failed.");
    if (twin.status === "cancelled") say($("twin-fault"), "The serial twin was cancelled.");
    this.renderPanes();
    this.onJob(twin);
    this.onTwin();
  }

  renderPanes() {
    const { own, twin, map } = this.panes;
    this.fill(own, this.job);
    this.fill(twin, this.twin);
    const time = (job) => (elapsed(job) == null ? state(job) : seconds(elapsed(job)));
    own.note.textContent = time(this.job);
    twin.note.textContent = this.twin.status === "queued" ? waiting(this.twin.position).toLowerCase()
      : this.twin.status === "in_progress" ? stepText(this.twin).toLowerCase() : time(this.twin);
    map.figure.hidden = this.twin.status !== "completed";
    this.layOver();
    if (this.measured) this.showMap().catch((fault) => say($("twin-fault"), fault.message));
  }

  /** Lays the two pictures over each other; a slider says how much of the twin is seen. */
  layOver() {
    const outputs = [this.job, this.twin].map((job) => (job.status === "completed" ? job.outputs[Math.min(this.index, job.outputs.length - 1)] : null));
    $("slide").hidden = !outputs.every((output) => output && output.kind !== "video");
    if ($("slide").hidden) return;
    if (!$("slide-frame").children.length || this.laid !== this.job.id) {
      this.laid = this.job.id;
      $("slide-frame").style.setProperty("--ratio", this.panes.own.frame.style.getPropertyValue("--ratio"));
      $("slide-frame").replaceChildren(picture(`${this.job.prompt}, this job`), picture(`${this.job.prompt}, serial twin`));
    }
    outputs.forEach((output, at) => show($("slide-frame").children[at], output.url).catch((fault) => say($("twin-fault"), fault.message)));
    this.slide();
  }

  slide() {
    $("slide-frame").style.setProperty("--at", `${$("slide-at").value}%`);
  }

  fill(pane, job) {
    const output = job.outputs[Math.min(this.index, job.outputs.length - 1)];
    if (!output) return;
    if (output.kind !== "video") show(pane.image, output.url).catch((fault) => say($("twin-fault"), fault.message));
    else if (isFinal(job) && pane.frame.firstChild.dataset.url !== output.url) {
      pane.frame.replaceChildren(player(output.url, { growing: false, label: pane.image.alt }));
    }
  }

  /** Asks for the numbers, which exist once both are done. */
  async measure() {
    const { signal } = this.following || {};
    if (this.measured || this.job.status !== "completed" || this.twin?.status !== "completed") return;
    this.measured = this.job.id;
    const job = await call(`/v1/jobs/${encodeURIComponent(this.job.id)}`);
    if (signal.aborted) return;
    Object.assign(this.job, job);
    this.renderNumbers(job);
    await this.showMap();
  }

  async showMap() {
    await show(this.panes.map.image, `/v1/jobs/${encodeURIComponent(this.job.id)}/difference?index=${this.index}`);
  }

  renderNumbers(job) {
    const rows = [];
    if (job.max_abs_diff != null) rows.push(["Largest difference", difference(job.max_abs_diff), levels(job.max_abs_diff)]);
    if (job.psnr_to_serial != null) rows.push(["PSNR to the twin", decibel(job.psnr_to_serial), "above 40 dB a difference is hard to see"]);
    const [own, twin] = [elapsed(job), elapsed(this.twin)];
    if (own && twin) rows.push(["Time", `${seconds(own)} and ${seconds(twin)}`, pace(twin / own)]);
    $("twin-numbers").replaceChildren(...rows.map(([name, value, hint]) => h("div", {}, h("dt", {}, name),
      h("dd", {}, value), h("dd", { class: "hint" }, hint))));
    say($("twin-sentence"), verdict(job, own && twin ? twin / own : null));
    announce(`The twin is done. Largest difference ${job.max_abs_diff}.`);
  }
}

/** Pictures hold whole levels from 0 to 255, so a difference is best pictured as a number of them. */
function levels(value) {
  const count = Math.round(value * 255);
  return count ? `${count} of 255 levels (max_abs_diff)` : "max_abs_diff, of values from 0 to 1";
}

const pace = (ratio) => (ratio >= 1 ? `${ratio.toFixed(2)} times as fast as the twin` : `${(1 / ratio).toFixed(2)} times slower than the twin`);

// The job in the middle of the page: its pictures, how far it is, what its ranks sent, and what can be done with it.

import { call, follow, isFinal } from "./wire.js";
import { picture, player, preview, show, source } from "./media.js";
import { Comparison } from "./compare.js";
import { $, announce, bytes, elapsed, facts, h, say, seconds, state, stepText, waiting } from "./words.js";

export class Stage {
  /** `onJob` hears of every change of a job, `onReuse` gets the job whose settings are wanted again. */
  constructor({ onJob, onReuse }) {
    this.onJob = onJob;
    this.job = null;
    this.selected = 0;
    this.following = new AbortController();
    this.comparison = new Comparison({ onJob, onTwin: () => this.renderButtons() });
    $("cancel").addEventListener("click", () => this.cancel());
    $("twin").addEventListener("click", () => this.makeTwin());
    $("reuse").addEventListener("click", () => onReuse(this.job));
    $("whole-prompt").addEventListener("click", () => this.showPrompt($("whole-prompt").getAttribute("aria-expanded") !== "true"));
    $("large").addEventListener("click", () => this.enlarge());
    $("large-close").addEventListener("click", () => $("large-view").close());
    setInterval(() => this.renderTime(), 1000);
  }

  /** Shows a job by its id, or the job itself where it is at hand, scrolls to it if asked, and follows it until it ends. */
  async open(id, job = null, { intoView = false } = {}) {
    if (this.job?.id === id && !this.following.signal.aborted) return;
    this.close();
    const { signal } = (this.following = new AbortController());
    job = job || (await call(`/v1/jobs/${encodeURIComponent(id)}`));
    if (signal.aborted) return;
    this.lay(job);
    this.render(job);
    if (intoView) $("stage").scrollIntoView({ block: "start" });
    if (!isFinal(job)) await this.follow(id, signal);
  }

  close() {
    this.following.abort();
    this.comparison.close();
    this.job = null;
    document.title = "partsong";
    $("stage").hidden = true;
  }

  async follow(id, signal) {
    try {
      await follow(id, {
        signal,
        onJob: (job) => this.render(job),
        onPreview: ({ index = 0, b64_json: base64 }) => this.preview(index, base64),
        onLost: () => say($("stage-note"), "The connection was lost. Trying again."),
      });
    } catch (fault) {
      if (!signal.aborted) say($("stage-fault"), fault.message);
    }
  }

  /** Makes room for the pictures of a job before the first of them is there. */
  lay(job) {
    this.selected = 0;
    this.word = null;
    const count = job.kind === "video" ? 1 : Math.max(job.n || 1, job.outputs.length);
    const [width, height] = (job.size || "1x1").split("x").map(Number);
    this.frames = Array.from({ length: count }, (_, index) => this.frame(job, index, count));
    for (const frame of this.frames) frame.style.setProperty("--ratio", `${width} / ${height}`);
    $("stage-media").replaceChildren(...this.frames);
    $("stage-media").dataset.count = Math.min(count, 4);
    for (const id of ["stage-fault", "stage-note", "twin-fault"]) say($(id), "");
    $("stage").hidden = false;
    $("empty").hidden = true;
    $("stage-prompt").textContent = job.prompt || "(no prompt)";
    this.showPrompt(false);
    $("whole-prompt").hidden = $("stage-prompt").scrollHeight <= $("stage-prompt").clientHeight + 1;
  }

  /** Shows all of a long prompt, or its first lines, so that the picture stays in sight. */
  showPrompt(whole) {
    $("stage-prompt").classList.toggle("whole", whole);
    $("whole-prompt").setAttribute("aria-expanded", String(whole));
    $("whole-prompt").textContent = whole ? "Show less of it" : "Show all of it";
  }

  /** Shows the chosen picture with a pixel for each of its own, in a window that scrolls. */
  async enlarge() {
    const image = picture(this.job.prompt);
    $("large-frame").replaceChildren(image);
    $("large-view").showModal();
    await show(image, this.job.outputs[Math.min(this.selected, this.job.outputs.length - 1)].url);
  }

  frame(job, index, count) {
    const image = picture(count > 1 ? `${job.prompt} (${index + 1} of ${count})` : job.prompt);
    if (count === 1) return h("figure", { class: "frame" }, image);
    const choose = () => this.choose(index);
    return h("figure", { class: "frame" },
      h("button", { type: "button", "aria-pressed": index === 0 ? "true" : "false", click: choose }, image));
  }

  choose(index) {
    this.selected = index;
    this.frames.forEach((frame, at) => frame.firstChild.setAttribute("aria-pressed", String(at === index)));
    this.comparison.choose(index);
    this.renderButtons();
  }

  preview(index, base64) {
    const image = this.frames[index]?.querySelector("img");
    if (image && !this.job.outputs.length) preview(image, base64);
  }

  render(job) {
    if (this.job && this.job.status !== job.status) say($("stage-note"), "");
    this.job = job;
    $("stage-state").textContent = state(job);
    $("stage-state").dataset.status = job.status;
    $("stage").dataset.class = job.strategy === "serial" ? "serial" : job.class || "";
    $("stage-facts").textContent = facts(job);
    say($("stage-advice"), job.advice);
    $("to-measure").hidden = $("to-server").hidden || !/was not measured/.test(job.advice || "");
    if (job.note) say($("stage-note"), capital(job.note));
    if (job.error) say($("stage-fault"), capital(job.error.message));
    this.renderProgress();
    this.renderMedia();
    this.renderRanks();
    this.renderButtons();
    this.comparison.render(job);
    this.speak();
    this.onJob(job);
  }

  renderProgress() {
    const { job } = this;
    $("stage-progress").hidden = isFinal(job);
    document.title = isFinal(job) ? "partsong" : `${job.progress || 0} % · partsong`;
    if (job.status === "queued") {
      $("stage-bar").removeAttribute("value");
      $("stage-step").textContent = waiting(job.position);
    } else {
      $("stage-bar").value = job.progress || 0;
      $("stage-step").textContent = stepText(job);
    }
    this.renderTime();
  }

  renderTime() {
    const { job } = this;
    if (!job) return;
    const time = elapsed(job);
    $("stage-time").textContent = time == null ? "" : seconds(time);
    if (job.status === "completed" && time != null) $("stage-state").textContent = `done in ${seconds(time)}`;
  }

  renderMedia() {
    const { job } = this;
    $("stage-media").hidden = isFinal(job) && !job.outputs.length;
    $("stage-media").classList.toggle("idle", job.status === "queued");
    job.outputs.forEach((output, index) => {
      const frame = this.frames[index];
      if (!frame) return;
      if (output.kind === "video") this.renderVideo(frame, output.url);
      else show(frame.querySelector("img"), output.url).catch((fault) => say($("stage-fault"), fault.message));
    });
  }

  renderVideo(frame, url) {
    const growing = !isFinal(this.job);
    const old = frame.querySelector("video");
    if (old && old.dataset.url === url && old.dataset.growing === String(growing)) return;
    const fresh = player(url, { growing, label: this.job.prompt });
    if (old) fresh.addEventListener("loadedmetadata", () => { fresh.currentTime = old.currentTime; }, { once: true });
    frame.replaceChildren(fresh);
  }

  renderRanks() {
    const ranks = this.job.ranks || [];
    const most = (name) => Math.max(...ranks.map((rank) => rank[name] || 0), 1e-9);
    const cell = (rank, name, text) => {
      const bar = h("td", { class: "bar" }, text);
      bar.style.setProperty("--share", `${(100 * (rank[name] || 0)) / most(name)}%`);
      return bar;
    };
    $("ranks").hidden = !ranks.length;
    $("rank-rows").replaceChildren(...ranks.map((rank) => h("tr", {},
      h("th", { scope: "row" }, String(rank.rank)),
      cell(rank, "bytes_sent", bytes(rank.bytes_sent || 0)),
      cell(rank, "seconds_waiting", seconds(rank.seconds_waiting || 0)))));
  }

  renderButtons() {
    const { job } = this;
    if (!job) return;
    const done = job.status === "completed" && job.outputs.length > 0;
    const { twin } = this.comparison;
    const twinRuns = Boolean(twin) && !isFinal(twin);
    $("cancel").hidden = isFinal(job) && !twinRuns;
    $("cancel").textContent = isFinal(job) ? "Cancel the twin" : "Cancel";
    $("twin").hidden = !done || Boolean(job.twin) || job.strategy === "serial" || job.kind === "chat";
    $("reuse").hidden = false;
    $("to-original").hidden = !job.twin_of;
    if (job.twin_of) $("to-original").href = `#job=${job.twin_of}`;
    $("save").hidden = !done;
    $("large").hidden = !done || job.kind === "video";
    if (done) this.renderSave(job.outputs[Math.min(this.selected, job.outputs.length - 1)].url);
  }

  renderSave(url) {
    $("save").textContent = this.job.outputs.length > 1 ? `Save picture ${this.selected + 1}` : "Save";
    $("save").download = url.split("/").pop();
    source(url).then((address) => { $("save").href = address; }, () => { $("save").hidden = true; });
  }

  /** Says states and quarters of the way, not every step. */
  speak() {
    const { job } = this;
    const quarter = Math.floor((job.progress || 0) / 25) * 25;
    const word = job.status === "in_progress" ? `Running, ${quarter} percent` : job.status === "queued"
      ? waiting(job.position) : job.error ? "" : `The job is ${state(job)}.`;
    if (word && word !== this.word) announce(word);
    this.word = word;
  }

  async cancel() {
    $("cancel").disabled = true;
    try {
      const { id } = isFinal(this.job) ? this.comparison.twin : this.job;
      const job = await call(`/v1/jobs/${encodeURIComponent(id)}/cancel`, { method: "POST" });
      if (this.job?.id === job.id) this.render(job);
      $("stage").focus();
    } catch (fault) {
      say($("stage-fault"), fault.message);
    }
    $("cancel").disabled = false;
  }

  async makeTwin() {
    const { id } = this.job;
    $("twin").disabled = true;
    say($("twin-fault"), "");
    try {
      const twin = await call(`/v1/jobs/${encodeURIComponent(id)}/twin`, { method: "POST" });
      if (this.job?.id === id) {
        this.job.twin = twin.id;
        this.comparison.render(this.job, twin);
        this.renderButtons();
        $("stage").focus({ preventScroll: true });
      }
    } catch (fault) {
      say($("stage-fault"), fault.message);
    }
    $("twin").disabled = false;
  }
}

const capital = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

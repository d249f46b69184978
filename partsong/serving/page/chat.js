// A chat with text and thinking models: the answer as it is written, and the threads behind it as they run.

import { events, open } from "./wire.js";
import { $, announce, h, number, say } from "./words.js";

const SAVED = "partsong-chat";
const ENDED = ["finished", "cancelled", "stopped", "failed"];
/** What an answer cost, in the order in which it is shown. */
const COUNTS = {
  completion_tokens: "tokens written", tokens_critical: "one after another", tokens_accepted: "in the answer",
  tokens_cancelled: "cancelled", prompt_tokens: "read", calls: "calls", forwards: "forwards", tokens_per_forward: "tokens per forward",
};

export class Chat {
  constructor({ onFault }) {
    this.onFault = onFault;
    this.messages = [];
    this.running = null;
    $("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    $("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.ask(); }
    });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("new-chat").addEventListener("click", () => this.clear());
    $("chat-model").addEventListener("change", () => this.modelChanged());
  }

  setModels(models) {
    const groups = [["text", "Text"], ["thinking", "Thinking"]].map(([kind, label]) => {
      const options = models.filter((model) => model.kind === kind).map((model) => h("option", { value: model.id }, model.id));
      return options.length ? h("optgroup", { label }, ...options) : null;
    });
    const chosen = $("chat-model").value;
    $("chat-model").replaceChildren(...groups.filter(Boolean));
    if (chosen) $("chat-model").value = chosen;
    this.models = models;
    for (const id of ["max-tokens", "temperature"]) $(id).placeholder = "default";
    if (!this.messages.length) this.restore();
    this.modelChanged();
  }

  /** Offers the strategies of the chosen model; any other may be typed. */
  modelChanged() {
    const model = this.models.find(({ id }) => id === $("chat-model").value);
    $("chat-strategies").replaceChildren(...(model?.strategies || []).map((name) => h("option", { value: name })));
  }

  restore() {
    const saved = JSON.parse(sessionStorage.getItem(SAVED) || "{}");
    this.messages = saved.messages || [];
    if (saved.model && [...$("chat-model").options].some((option) => option.value === saved.model)) $("chat-model").value = saved.model;
    for (const message of this.messages) this.bubble(message.role, message.content);
  }

  keep() {
    sessionStorage.setItem(SAVED, JSON.stringify({ messages: this.messages, model: $("chat-model").value }));
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.keep();
    $("talk").replaceChildren();
    $("chat-empty").hidden = false;
    $("question").focus();
  }

  bubble(role, text = "") {
    const content = h("div", { class: "said" }, text);
    const turn = h("article", { class: `turn ${role}` }, h("h3", { class: "hidden" }, role === "user" ? "You" : "Answer"), content);
    $("talk").append(turn);
    $("chat-empty").hidden = true;
    return { turn, content, threads: null, cards: new Map() };
  }

  async ask() {
    const text = $("question").value.trim();
    if (!text || this.running) return;
    say($("chat-fault"), "");
    const user = this.bubble("user", text);
    const answer = this.bubble("assistant");
    $("question").value = "";
    this.busy(new AbortController());
    const asked = [...this.messages, { role: "user", content: text }];
    let written = "";
    try {
      written = await this.stream(asked, answer, this.running.signal);
      announce("The answer is complete.");
    } catch (fault) {
      written = answer.content.textContent;
      if (fault.name !== "AbortError") say($("chat-fault"), fault.message);
      this.end(answer, fault.name === "AbortError" ? "stopped" : "failed");
    }
    if (written) this.messages = [...asked, { role: "assistant", content: written }];
    else { user.turn.remove(); answer.turn.remove(); $("question").value = $("question").value || text; }
    this.keep();
    this.busy(null);
  }

  busy(controller) {
    this.running = controller;
    $("stop").hidden = !controller;
    $("ask").hidden = Boolean(controller);
    $("talk").setAttribute("aria-busy", String(Boolean(controller)));
    if (controller) announce("Waiting for the answer.");
    $("question").focus();
  }

  async stream(messages, answer, signal) {
    const value = (id) => ($(id).value === "" ? undefined : Number($(id).value));
    const body = {
      // A strategy follows the model's name, and a model that is named alone answers once.
      model: [$("chat-model").value, $("chat-strategy").value.trim()].filter(Boolean).join(":"), 
      messages, stream: true, max_tokens: value("max-tokens"), temperature: value("temperature"),
      stream_options: { include_usage: true, include_threads: true },
    };
    answer.turn.classList.add("open");
    const response = await open("/v1/chat/completions", { method: "POST", body, signal });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      this.chunk(JSON.parse(data), answer);
    }
    this.end(answer, "");
    return answer.content.textContent;
  }

  chunk(chunk, answer) {
    if (chunk.error) throw new Error(chunk.error.message);
    const low = innerHeight + scrollY >= document.documentElement.scrollHeight - 120;
    const delta = chunk.choices?.[0]?.delta;
    if (delta?.content) answer.content.append(delta.content);
    if (chunk.partsong && "thread" in chunk.partsong) this.thread(chunk.partsong, answer);
    else if (chunk.partsong || chunk.usage) this.counts(chunk, answer);
    if (low) scrollTo({ top: document.documentElement.scrollHeight });
  }

  thread({ thread, label, text, status }, answer) {
    if (!answer.threads) {
      answer.list = h("ul", { class: "threads" });
      answer.summary = h("summary");
      answer.threads = h("details", { open: true }, answer.summary, answer.list);
      answer.turn.insertBefore(answer.threads, answer.content);
    }
    if (!answer.cards.has(thread)) {
      const card = { state: h("span", { class: "state" }), text: h("div", { class: "words", tabindex: "0" }), name: h("b") };
      card.item = h("li", {}, h("p", { class: "head" }, card.name, card.state), card.text);
      card.text.setAttribute("role", "group");
      answer.cards.set(thread, card);
      answer.list.append(card.item);
    }
    const card = answer.cards.get(thread);
    card.name.textContent = label || `thread ${thread}`;
    card.text.setAttribute("aria-label", `Text of ${card.name.textContent}`);
    if (text) card.text.append(text);
    if (status) { card.state.textContent = status; card.item.dataset.status = status; }
    card.text.scrollTop = card.text.scrollHeight;
    this.summarize(answer);
  }

  summarize(answer) {
    const cards = [...answer.cards.values()];
    const open = cards.filter((card) => !ENDED.includes(card.item.dataset.status)).length;
    const all = cards.length === 1 ? "1 thread" : `${cards.length} threads`;
    answer.summary.textContent = open && answer.turn.classList.contains("open") ? `${all}, ${open} running` : all;
  }

  /** Closes the threads of a finished answer, so that the answer stands by itself. */
  end(answer, word) {
    answer.turn.classList.remove("open");
    if (!answer.threads) return;
    for (const { item, state } of answer.cards.values()) {
      if (word && !ENDED.includes(item.dataset.status)) { state.textContent = item.dataset.status = word; }
    }
    this.summarize(answer);
    if (!word) answer.threads.open = false;
  }

  /** Shows what the answer cost. The report of a strategy and the usage of all its calls come in chunks of their own. */
  counts(chunk, answer) {
    const { completion_tokens: written, prompt_tokens: prompt } = chunk.usage || {};
    answer.costs = { ...answer.costs, ...(chunk.usage ? { completion_tokens: written, prompt_tokens: prompt } : {}), ...chunk.partsong };
    const rows = Object.entries(COUNTS).filter(([name]) => typeof answer.costs[name] === "number").map(([name, words]) => {
      const value = answer.costs[name];
      return `${Number.isInteger(value) ? number(value) : value.toPrecision(3)} ${value === 1 ? words.replace(/s$/, "") : words}`;
    });
    if (answer.costs.seed != null) rows.push(`seed ${answer.costs.seed}`);
    answer.usage?.remove();
    const found = answer.costs.answer ? h("b", {}, `Answer: ${answer.costs.answer}`) : null;
    answer.usage = h("p", { class: "usage" }, found, rows.join(" · "));
    if (rows.length) answer.turn.append(answer.usage);
  }
}

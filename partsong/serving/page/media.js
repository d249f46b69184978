// Pictures and videos: plain addresses without a key, blobs with one, and videos that play while they grow.

import { here, key, open, Fault } from "./wire.js";
import { h } from "./words.js";

const cache = new Map();
const KEPT = 200;

/** Returns an address for a picture or a finished video that an element can show. */
export async function source(url) {
  if (!key.get()) return here(url);
  if (!cache.has(url)) {
    const blob = open(url).then((response) => response.blob());
    cache.set(url, blob.then((content) => URL.createObjectURL(content)));
    cache.get(url).catch(() => cache.delete(url));
    if (cache.size > KEPT) {
      const [oldest, address] = cache.entries().next().value;
      cache.delete(oldest);
      address.then(URL.revokeObjectURL, () => {});
    }
  }
  return cache.get(url);
}

/** Shows a picture in an image element, the old content staying until the new one is there. */
export async function show(image, url) {
  if (image.dataset.url === url) return;
  image.dataset.url = url;
  const address = await source(url);
  const ready = new Image();
  ready.src = address;
  await ready.decode().catch(() => {});
  if (image.dataset.url !== url) return;
  image.src = address;
  mark(image, ready);
}

export function preview(image, base64) {
  delete image.dataset.url;
  image.src = `data:image/png;base64,${base64}`;
  image.classList.add("preview");
}

/** Small pictures are enlarged as squares: blurring would hide what is being compared. */
function mark(image, measured) {
  image.classList.remove("preview");
  image.classList.toggle("small", measured.naturalWidth > 0 && measured.naturalWidth < 200);
}

export function picture(alt) {
  return h("img", { alt, decoding: "async" });
}

/** Makes a player for a video file. While the job runs the file grows, and the player takes what comes. */
export function player(url, { growing, label }) {
  const video = h("video", { controls: true, playsinline: true, "aria-label": label });
  video.muted = true;
  video.loop = !growing;
  video.dataset.url = url;
  video.dataset.growing = growing;
  video.autoplay = true;
  if (growing && window.MediaSource) grow(video, url);
  else source(url).then((address) => { video.src = address; }, () => {});
  return video;
}

/**
 * Feeds a growing file into a player through fetch. An address alone would not do: it cannot send a key, and browsers
 * read files in blocks of many kilobytes, so a short video would not begin before its end.
 */
async function grow(video, url) {
  const media = new MediaSource();
  video.src = URL.createObjectURL(media);
  await new Promise((resolve) => media.addEventListener("sourceopen", resolve, { once: true }));
  URL.revokeObjectURL(video.src);
  try {
    const reader = (await open(url)).body.getReader();
    let buffer = null;
    let head = new Uint8Array();
    for (;;) {
      const { done, value } = await reader.read();
      if (done || !video.isConnected) break;
      let piece = value;
      if (!buffer) {
        head = joined(head, value);
        const codec = codecOf(head);
        if (!codec) continue;
        buffer = media.addSourceBuffer(`video/mp4; codecs="${codec}"`);
        piece = head;
      }
      buffer.appendBuffer(piece);
      await new Promise((resolve) => buffer.addEventListener("updateend", resolve, { once: true }));
    }
    if (media.readyState === "open") media.endOfStream();
  } catch (fault) {
    if (media.readyState === "open") media.endOfStream("network");
    if (!(fault instanceof Fault)) throw fault;
  }
}

function joined(first, second) {
  const both = new Uint8Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}

/** Reads the codec's name from an H.264 configuration box: profile, constraints and level follow its version byte. */
export function codecOf(head) {
  for (let at = 0; at + 8 <= head.length; at += 1) {
    if (head[at] === 0x61 && head[at + 1] === 0x76 && head[at + 2] === 0x63 && head[at + 3] === 0x43) {
      return "avc1." + [5, 6, 7].map((offset) => head[at + offset].toString(16).padStart(2, "0")).join("");
    }
  }
  return null;
}

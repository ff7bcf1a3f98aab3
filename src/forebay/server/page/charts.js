// The last minute on two canvases: what ran when, and how fast the link was.

import { at, bytes } from "./show.js";

const TENTHS = 600;
const SHARES = ["decode", "prefill", "wait", "prefetch", "demand", "save"];
const ROWS = [
  ["prefill", "step with prefill"],
  ["decode", "step, decode only"],
  ["wait", "held back by a load"],
  ["prefetch", "load ahead"],
  ["demand", "load on demand"],
  ["save", "save"],
];

// Tenths of a second, by their absolute number: later news of a tenth replaces earlier.
export class Minute {
  constructor() {
    this.newest = -1;
    this.of = {};
    for (const name of [...SHARES, "load_bytes_per_s", "save_bytes_per_s"]) this.of[name] = new Map();
  }

  add(lanes) {
    const count = lanes.decode.length;
    if (count) this.newest = Math.max(this.newest, lanes.first + count - 1);
    for (const [name, values] of Object.entries(this.of)) {
      lanes[name].forEach((value, i) => values.set(lanes.first + i, value));
      for (const tenth of values.keys()) {
        if (tenth > this.newest - TENTHS) break;
        values.delete(tenth);
      }
    }
  }

  get(name, back) {
    return this.of[name].get(this.newest - back) ?? 0;
  }

  mean(name, tenths) {
    let sum = 0;
    for (let back = 1; back <= tenths; back += 1) sum += this.get(name, back);
    return sum / tenths;
  }

  most(name) {
    let most = 0;
    for (const value of this.of[name].values()) most = Math.max(most, value);
    return most;
  }
}

// A canvas ready to draw on in CSS pixels, and the colours of the page as they are now.
function sheet(id) {
  const canvas = at(id);
  const { width, height } = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.clearRect(0, 0, width, height);
  const style = getComputedStyle(document.documentElement);
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  return { pen, width, height, colour: (name) => style.getPropertyValue(`--${name}`).trim() };
}

function timeAxis({ pen, width, height, colour }, left) {
  pen.fillStyle = colour("quiet");
  pen.strokeStyle = colour("line");
  pen.textBaseline = "alphabetic";
  const step = width - left < 420 ? 20 : 10;
  for (let s = 0; s <= 60; s += step) {
    const x = width - ((width - left) * s) / 60;
    pen.beginPath();
    pen.moveTo(x, 0);
    pen.lineTo(x, height - 16);
    pen.stroke();
    pen.textAlign = s === 0 ? "right" : s === 60 ? "left" : "center";
    pen.fillText(s === 0 ? "now" : `−${s} s`, x, height - 3);
  }
}

export function drawLanes(minute) {
  const paper = sheet("lanes");
  const { pen, width, height, colour } = paper;
  const narrow = width < 520;
  const left = narrow ? 0 : 132;
  timeAxis(paper, left);
  const tall = (height - 18) / ROWS.length;
  const label = narrow ? 12 : 0;
  ROWS.forEach(([name, text], i) => {
    const top = i * tall;
    pen.fillStyle = colour("track");
    pen.fillRect(left, top + label + 1, width - left, tall - label - 4);
    pen.fillStyle = colour(name);
    for (let back = 0; back < TENTHS; back += 1) {
      const share = minute.get(name, back) / 100;
      if (!share) continue;
      const x1 = width - ((width - left) * back) / TENTHS;
      const x0 = width - ((width - left) * (back + 1)) / TENTHS;
      const bar = Math.max(1, (tall - label - 4) * share);
      pen.fillRect(x0, top + tall - 3 - bar, x1 - x0 + 0.3, bar);
    }
    pen.fillStyle = colour("ink");
    pen.textAlign = "left";
    pen.textBaseline = narrow ? "top" : "middle";
    pen.fillText(text, 0, narrow ? top : top + tall / 2);
  });
  const share = (name) => `${text(minute.mean(name, TENTHS - 1))}`;
  const text = (percent) => (percent > 0 && percent < 1 ? "under 1 %" : `${Math.round(percent)} %`);
  at("lanes-summary").textContent =
    `Of the last minute: steps ${text(minute.mean("decode", TENTHS - 1) + minute.mean("prefill", TENTHS - 1))}, ` +
    `held back by a load ${share("wait")}, loads ${text(minute.mean("prefetch", TENTHS - 1) + minute.mean("demand", TENTHS - 1))}, ` +
    `saves ${share("save")}. A bar's height is its share of a tenth of a second.`;
}

function area(paper, minute, name, most, from, to, fill) {
  const { pen, width } = paper;
  pen.fillStyle = fill;
  pen.beginPath();
  pen.moveTo(width, from);
  for (let back = 0; back < TENTHS; back += 1) {
    const y = from + (to - from) * Math.min(1, minute.get(name, back) / most);
    pen.lineTo(width - (width * back) / TENTHS, y);
    pen.lineTo(width - (width * (back + 1)) / TENTHS, y);
  }
  pen.lineTo(0, from);
  pen.closePath();
  pen.fill();
}

// Loads upwards, saves downwards, both to the same scale.
export function drawRates(minute, link_bytes_per_s) {
  const paper = sheet("rates");
  const { pen, width, height, colour } = paper;
  timeAxis(paper, 0);
  const middle = (height - 16) / 2;
  const [load, save] = [minute.most("load_bytes_per_s"), minute.most("save_bytes_per_s")];
  const most = Math.max(load, save, 1);
  area(paper, minute, "load_bytes_per_s", most, middle, 14, colour("prefetch"));
  area(paper, minute, "save_bytes_per_s", most, middle, height - 30, colour("save"));
  pen.strokeStyle = colour("quiet");
  pen.beginPath();
  pen.moveTo(0, middle);
  pen.lineTo(width, middle);
  pen.stroke();
  pen.fillStyle = colour("ink");
  pen.textAlign = "left";
  pen.textBaseline = "top";
  pen.fillText(`▲ loads, at most ${bytes(load)} per s`, 2, 1);
  pen.textBaseline = "bottom";
  pen.fillText(`▼ saves, at most ${bytes(save)} per s`, 2, height - 17);
  at("link-summary").textContent =
    `Loads ${bytes(minute.mean("load_bytes_per_s", 10))} per s and saves ` +
    `${bytes(minute.mean("save_bytes_per_s", 10))} per s now; timed at ${bytes(link_bytes_per_s)} per s.`;
}

// The radix tree as rectangles: a level down for each branch, as wide as the blocks below.

import { at, number } from "./show.js";

const SVG = "http://www.w3.org/2000/svg";
const TALL = 26;
const MOST_LEVELS = 10;
const TIERS = [
  ["device", "on the device"],
  ["both", "on both"],
  ["loading", "loading"],
  ["host", "in host memory"],
];

function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Tiers differ by pattern as well as by colour.
function patterns() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const pattern = (name, ...marks) =>
    shape(
      "pattern",
      { id: `p-${name}`, width: 7, height: 7, patternUnits: "userSpaceOnUse" },
      shape("path", { d: "M0 0h7v7h-7z", fill: colour(name) }),
      ...marks,
    );
  const mark = { stroke: colour("panel"), "stroke-opacity": 0.55, "stroke-width": 1.4, fill: "none" };
  return shape(
    "defs",
    {},
    pattern("both", shape("circle", { cx: 3.5, cy: 3.5, r: 1.1, fill: colour("panel"), "fill-opacity": 0.7 })),
    pattern("host", shape("path", { ...mark, d: "M-1 1l2-2M0 7l7-7M6 8l2-2" })),
    pattern("loading", shape("path", { ...mark, d: "M2 0v7M5.500 0v7" })),
  );
}

// Where each node stands: children side by side under their parent, in the order of their weight.
function layout(tree, width) {
  const x = [], wide = [], level = [], below = new Map();
  tree.parent.forEach((parent, i) => below.set(parent, [...(below.get(parent) ?? []), i]));
  const all = (below.get(-1) ?? []).reduce((sum, i) => sum + tree.weight[i], 0);
  const place = (siblings, from, room, weight, depth) => {
    let left = from;
    for (const i of siblings.sort((a, b) => tree.weight[b] - tree.weight[a])) {
      x[i] = left;
      wide[i] = (room * tree.weight[i]) / Math.max(1, weight);
      level[i] = depth;
      left += wide[i];
    }
  };
  place(below.get(-1) ?? [], 0, width, all, 0);
  tree.parent.forEach((_, i) => {
    if (below.has(i)) place(below.get(i), x[i], wide[i], tree.weight[i], level[i] + 1);
  });
  return { x, wide, level };
}

function words(tree, i) {
  const where = TIERS.filter(([tier]) => tree[tier][i] > 0).map(([tier, name]) => `${tree[tier][i]} % ${name}`);
  const under = tree.weight[i] - tree.blocks[i];
  const more = under > 0 ? `, and ${tree.exact ? "" : "about "}${number(under)} below` : "";
  return `${number(tree.blocks[i])} blocks${more}: ${where.join(", ")}`;
}

function node(tree, i, place) {
  const [x, wide, y] = [place.x[i], place.wide[i], place.level[i] * TALL];
  const made = shape("g", { class: "node", tabindex: -1, role: "img", "aria-label": words(tree, i), "data-node": i });
  let left = x;
  const parts = TIERS.filter(([tier]) => tree[tier][i] > 0);
  const sum = parts.reduce((total, [tier]) => total + tree[tier][i], 0);
  for (const [tier] of parts.length ? parts : [["none"]]) {
    const part = sum ? (wide * tree[tier][i]) / sum : wide;
    made.append(shape("rect", { class: `t-${tier}`, x: left, y, width: Math.max(0.5, part), height: TALL - 2 }));
    left += part;
  }
  if (wide > 46) {
    const label = shape("text", { x: x + 5, y: y + 16 });
    label.textContent = number(tree.blocks[i]);
    made.append(label);
  }
  return made;
}

export class TreePicture {
  constructor() {
    this.tree = null;
    this.chosen = -1;
    const svg = at("tree");
    const choose = (event) => {
      const found = event.target.closest?.("g.node");
      if (found) this.choose(Number(found.dataset.node), event.type === "click");
    };
    svg.addEventListener("click", choose);
    svg.addEventListener("pointerover", choose);
    svg.addEventListener("keydown", (event) => this.move(event));
    at("tree-legend").replaceChildren(
      ...TIERS.map(([tier, name]) => {
        const item = document.createElement("li");
        const box = document.createElement("i");
        box.className = tier;
        item.append(box, name);
        return item;
      }),
    );
  }

  show(tree, tokens) {
    this.tree = tree;
    this.tokens = tokens;
    this.draw();
  }

  draw() {
    const tree = this.tree;
    if (!tree) return;
    const svg = at("tree");
    const width = svg.getBoundingClientRect().width;
    const place = layout(tree, width);
    const shown = [...tree.parent.keys()].filter((i) => place.level[i] < MOST_LEVELS && place.wide[i] >= 0.5);
    const levels = shown.reduce((most, i) => Math.max(most, place.level[i] + 1), 1);
    svg.setAttribute("viewBox", `0 0 ${width} ${levels * TALL}`);
    svg.style.height = `${levels * TALL}px`;
    const focused = svg.contains(document.activeElement);
    svg.replaceChildren(patterns(), ...shown.map((i) => node(tree, i, place)));
    const first = svg.querySelector(`[data-node="${this.chosen}"]`) ?? svg.querySelector("g.node");
    first?.setAttribute("tabindex", 0);
    if (focused) first?.focus();
    const about = tree.exact ? "" : " The largest, weighed by a sample.";
    at("tree-summary").textContent = tree.total
      ? `${number(tree.total)} blocks of ${this.tokens} tokens. A level is a branch, a width its blocks and those below.${about}`
      : "Nothing is cached yet.";
  }

  choose(i, focus) {
    this.chosen = i;
    at("tree-node").textContent = `${words(this.tree, i)}.`;
    for (const other of at("tree").querySelectorAll("g.node")) other.setAttribute("tabindex", -1);
    const found = at("tree").querySelector(`[data-node="${i}"]`);
    found?.setAttribute("tabindex", 0);
    if (focus) found?.focus();
  }

  // Arrow keys: up to the parent, down to the first child, left and right through all.
  move(event) {
    const nodes = [...at("tree").querySelectorAll("g.node")].map((each) => Number(each.dataset.node));
    const here = nodes.indexOf(Number(document.activeElement?.dataset?.node ?? -1));
    if (here < 0) return;
    const to = {
      ArrowRight: nodes[here + 1],
      ArrowLeft: nodes[here - 1],
      ArrowUp: this.tree.parent[nodes[here]],
      ArrowDown: nodes.find((i) => this.tree.parent[i] === nodes[here]),
    }[event.key];
    if (to === undefined || to < 0) return;
    event.preventDefault();
    this.choose(to, true);
  }
}

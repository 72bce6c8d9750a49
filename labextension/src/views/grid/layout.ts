/** Where the cells of a grid are: pure geometry in CSS pixels, that depends on counts and widths, not on states. */

import type { HostGroup } from '../../model';

/** Up to so many ranks each has a card with text. */
export const CARDS_UP_TO = 16;
/** Up to so many ranks each has a cell, and above it each host a bar. */
export const CELLS_UP_TO = 256;

export type GridMode = 'cards' | 'cells' | 'hosts';

/** How a mesh is shown if the person has not chosen. */
export function modeFor(ranks: number, hosts: number): GridMode {
  if (ranks <= CARDS_UP_TO) {
    return 'cards';
  }
  return ranks <= CELLS_UP_TO || hosts <= 1 ? 'cells' : 'hosts';
}

export interface Box {
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
}

/** The name of a host, where it is drawn. */
export interface LabelBox extends Box {
  readonly group: number;
}

/** A way to lay items out: item `index` is the index of a rank among all that are shown, or of a host. */
export interface Layout {
  readonly height: number;
  readonly count: number;
  readonly labels: readonly LabelBox[];
  box(index: number): Box;
  /** The item at a point, or -1. */
  at(x: number, y: number): number;
  /** The items between two heights, as a range without its end; a few that are outside may be in it. */
  between(top: number, bottom: number): [first: number, end: number];
  /** The item that an arrow key leads to, or the same. */
  move(index: number, dx: number, dy: number): number;
}

/** The distances of two cells that are tried, by how many there are, the best first. */
function pitches(ranks: number): readonly number[] {
  return ranks <= 64 ? [28, 24, 22] : ranks <= CELLS_UP_TO ? [20, 18] : ranks <= 1024 ? [16] : [14];
}

/** The space between two cells. */
export const CELL_GAP = 2;
const LABEL_HEIGHT = 20;
const BLOCK_GAP = 8;
const COLUMN_GAP = 16;

interface Block {
  readonly x: number;
  readonly y: number;
  readonly columns: number;
  readonly first: number;
  readonly count: number;
  readonly height: number;
}

/** Cells of ranks, those of a host together, with its name beside them, or above where they need the width. */
export function layoutCells(groups: readonly HostGroup[], width: number, labelled = true): Layout {
  const total = groups.reduce((sum, group) => sum + group.ranks.length, 0);
  const most = groups.reduce((count, group) => Math.max(count, group.ranks.length), 1);
  const beside = labelled ? (width >= 480 ? 104 : 76) : 0;
  const tried = pitches(total);
  const fitting = tried.find(pitch => beside + most * pitch <= width);
  const fits = fitting !== undefined;
  const pitch = fitting ?? tried[0] ?? 14;
  const labelWidth = fits ? beside : 0;
  const labelHeight = labelled && !fits ? LABEL_HEIGHT : 0;
  const room = Math.max(1, Math.floor((width - labelWidth) / pitch));
  // Rows of a round number of cells are read more easily.
  const columns = Math.min(most, room > 8 ? room - (room % 8) : room);
  const blockWidth = labelWidth + columns * pitch + COLUMN_GAP;
  const across = fits ? Math.max(1, Math.floor((width + COLUMN_GAP) / blockWidth)) : 1;

  const blocks: Block[] = [];
  const labels: LabelBox[] = [];
  let first = 0;
  let y = 0;
  for (let start = 0; start < groups.length; start += across) {
    let tallest = 0;
    groups.slice(start, start + across).forEach((group, column) => {
      const x = column * blockWidth;
      const height = labelHeight + Math.ceil(group.ranks.length / columns) * pitch;
      blocks.push({ x: x + labelWidth, y: y + labelHeight, columns, first, count: group.ranks.length, height });
      if (labelled) {
        const box = fits
          ? { x, y, width: labelWidth - 8, height: pitch - CELL_GAP }
          : { x, y, width: width - 8, height: LABEL_HEIGHT };
        labels.push({ ...box, group: start + column });
      }
      first += group.ranks.length;
      tallest = Math.max(tallest, height);
    });
    y += tallest + (fits && tallest === pitch ? 0 : BLOCK_GAP);
  }
  return new CellLayout(blocks, labels, pitch, y, total);
}

class CellLayout implements Layout {
  constructor(
    private readonly _blocks: readonly Block[],
    readonly labels: readonly LabelBox[],
    private readonly _pitch: number,
    readonly height: number,
    readonly count: number
  ) {}

  box(index: number): Box {
    const block = this._blocks[this._blockOf(index)];
    if (!block) {
      return { x: 0, y: 0, width: 0, height: 0 };
    }
    const at = index - block.first;
    const size = this._pitch - CELL_GAP;
    return {
      x: block.x + (at % block.columns) * this._pitch,
      y: block.y + Math.floor(at / block.columns) * this._pitch,
      width: size,
      height: size
    };
  }

  at(x: number, y: number): number {
    const [first, end] = this._blocksBetween(y, y);
    for (const block of this._blocks.slice(first, end)) {
      const column = Math.floor((x - block.x) / this._pitch);
      const row = Math.floor((y - block.y) / this._pitch);
      const at = row * block.columns + column;
      if (column >= 0 && column < block.columns && row >= 0 && at < block.count) {
        return block.first + at;
      }
    }
    return -1;
  }

  between(top: number, bottom: number): [number, number] {
    const [from, to] = this._blocksBetween(top, bottom);
    const shown = this._blocks.slice(from, to);
    const one = shown.length === 1 ? shown[0] : undefined;
    if (one) {
      // One host with thousands of ranks: only the rows that are seen.
      const row = (y: number) => Math.floor((y - one.y) / this._pitch);
      const begin = Math.max(0, row(top)) * one.columns;
      const end = Math.min(one.count, (row(bottom) + 1) * one.columns);
      return [one.first + Math.min(begin, one.count), one.first + Math.max(0, end)];
    }
    const last = shown.at(-1);
    return last ? [shown[0]?.first ?? 0, last.first + last.count] : [0, 0];
  }

  move(index: number, dx: number, dy: number): number {
    if (dx) {
      return Math.min(this.count - 1, Math.max(0, index + dx));
    }
    const { x, y, width } = this.box(index);
    const middle = x + width / 2;
    for (let step = 1; step <= 4; step++) {
      // Between two hosts there may be the height of a label.
      const found = this.at(middle, y + dy * step * this._pitch + this._pitch / 2);
      if (found >= 0 && found !== index) {
        return found;
      }
    }
    return index;
  }

  /** The last block whose first item is not after `index`. */
  private _blockOf(index: number): number {
    return search(this._blocks.length, at => (this._blocks[at]?.first ?? 0) <= index) - 1;
  }

  private _blocksBetween(top: number, bottom: number): [number, number] {
    const end = search(this._blocks.length, at => (this._blocks[at]?.y ?? 0) <= bottom);
    // Blocks of one row may differ in height, so the first one that is seen is found from the tallest of its row.
    let first = search(this._blocks.length, at => this._bottomOfRow(at) < top);
    first = Math.min(first, end);
    return [first, end];
  }

  private _bottomOfRow(at: number): number {
    const y = this._blocks[at]?.y ?? 0;
    const next = this._blocks[search(this._blocks.length, other => (this._blocks[other]?.y ?? 0) <= y)];
    return next ? next.y : this.height;
  }
}

/** How many of the first of `count` items hold a condition that, once it fails, holds no more. */
function search(count: number, holds: (index: number) => boolean): number {
  let low = 0;
  let high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

const TILE_HEIGHT = 30;
const TILE_WIDTH = 260;

/** One tile for each host: its name, its ranks by state, its worst news. */
export function layoutHosts(count: number, width: number): Layout {
  const across = Math.max(1, Math.floor((width + COLUMN_GAP) / (TILE_WIDTH + COLUMN_GAP)));
  const tile = Math.floor((width - (across - 1) * COLUMN_GAP) / across);
  const rows = Math.ceil(count / across);
  return {
    height: rows * TILE_HEIGHT,
    count,
    labels: [],
    box: index => ({
      x: (index % across) * (tile + COLUMN_GAP),
      y: Math.floor(index / across) * TILE_HEIGHT,
      width: tile,
      height: TILE_HEIGHT - 4
    }),
    at: (x, y) => {
      const column = Math.floor(x / (tile + COLUMN_GAP));
      const index = Math.floor(y / TILE_HEIGHT) * across + column;
      const inside = x >= 0 && y >= 0 && column < across && x - column * (tile + COLUMN_GAP) < tile;
      return inside && index < count ? index : -1;
    },
    between: (top, bottom) => [
      Math.min(count, Math.max(0, Math.floor(top / TILE_HEIGHT)) * across),
      Math.min(count, Math.max(0, Math.floor(bottom / TILE_HEIGHT) + 1) * across)
    ],
    move: (index, dx, dy) => {
      const to = index + dx + dy * across;
      return to >= 0 && to < count ? to : index;
    }
  };
}

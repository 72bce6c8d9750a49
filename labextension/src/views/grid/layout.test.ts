import { describe, expect, it } from 'vitest';
import type { HostGroup } from '../../model';
import type { Layout } from './layout';
import { layoutCells, layoutHosts, modeFor } from './layout';

function groups(hosts: number, each: number): HostGroup[] {
  return Array.from({ length: hosts }, (_, host) => ({
    host: `h${host}`,
    ranks: Array.from({ length: each }, (_, at) => host * each + at)
  }));
}

const SHAPES: [hosts: number, each: number][] = [
  [8, 8],
  [1, 256],
  [32, 8],
  [3, 7],
  [128, 8],
  [512, 8],
  [1, 4096],
  [7, 100]
];

/** All items: each found at its middle, inside the width, over no other. */
function check(layout: Layout, width: number): void {
  const seen = new Set<string>();
  for (let index = 0; index < layout.count; index++) {
    const { x, y, width: wide, height } = layout.box(index);
    expect(layout.at(x + wide / 2, y + height / 2)).toBe(index);
    expect(x).toBeGreaterThanOrEqual(0);
    expect(x + wide).toBeLessThanOrEqual(width);
    expect(y + height).toBeLessThanOrEqual(layout.height);
    seen.add(`${x} ${y}`);
  }
  expect(seen.size).toBe(layout.count);
}

describe('modeFor', () => {
  it('has cards, cells, and bars of hosts', () => {
    expect([1, 16].map(ranks => modeFor(ranks, 1))).toEqual(['cards', 'cards']);
    expect([17, 256].map(ranks => modeFor(ranks, 8))).toEqual(['cells', 'cells']);
    expect(modeFor(257, 8)).toBe('hosts');
    expect(modeFor(4096, 1)).toBe('cells');
  });
});

describe('layoutCells', () => {
  for (const width of [260, 600, 1200]) {
    it.each(SHAPES)(`has a place for each of %i x %i ranks in ${width} px`, (hosts, each) => {
      const layout = layoutCells(groups(hosts, each), width);
      expect(layout.count).toBe(hosts * each);
      check(layout, width);
      for (const label of layout.labels) {
        expect(label.width).toBeGreaterThan(40);
        expect(layout.at(label.x + 1, label.y + 1)).toBe(-1);
      }
    });
  }

  it.each(SHAPES)('draws of %i x %i ranks those that are in view', (hosts, each) => {
    const layout = layoutCells(groups(hosts, each), 600);
    for (let top = 0; top < layout.height; top += 97) {
      const [first, end] = layout.between(top, top + 200);
      for (let index = 0; index < layout.count; index++) {
        const { y, height } = layout.box(index);
        if (y < top + 200 && y + height > top) {
          expect(index).toBeGreaterThanOrEqual(first);
          expect(index).toBeLessThan(end);
        }
      }
      expect(end - first).toBeLessThan(2_200);
    }
  });

  it('is moved through by arrow keys', () => {
    const layout = layoutCells(groups(8, 8), 300);
    expect(layout.move(0, 1, 0)).toBe(1);
    expect(layout.move(0, -1, 0)).toBe(0);
    expect(layout.move(3, 0, 1)).toBe(11);
    expect(layout.move(11, 0, -1)).toBe(3);
    expect(layout.move(63, 0, 1)).toBe(63);
    expect(layout.move(63, 1, 0)).toBe(63);
    // Names of hosts above cells are passed over.
    const wide = layoutCells(groups(2, 40), 300);
    const { x, y } = wide.box(wide.move(39, 0, 1));
    expect(x).toBe(wide.box(39).x);
    expect(y).toBeGreaterThan(wide.box(39).y);
  });

  it('does not depend on anything but counts and widths', () => {
    expect(layoutCells(groups(8, 8), 300).height).toBe(layoutCells(groups(8, 8), 300).height);
    expect(layoutCells([], 300)).toMatchObject({ count: 0, height: 0 });
  });
});

describe('layoutHosts', () => {
  it.each([260, 600, 1200])('has a tile for each host in %i px', width => {
    const layout = layoutHosts(513, width);
    check(layout, width);
    expect(layout.between(0, 100)[0]).toBe(0);
    expect(layout.between(layout.height - 10, layout.height)[1]).toBe(513);
    expect(layout.move(0, 0, -1)).toBe(0);
    expect(layout.at(-5, 5)).toBe(-1);
    expect(layout.at(5, layout.height + 50)).toBe(-1);
  });
});

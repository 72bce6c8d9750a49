/** Sets of ranks, as people write them: `0-3, 7`. */

/** The set in order, runs joined: `0-3, 7`. */
export function formatRanks(ranks: Iterable<number>): string {
  const sorted = [...new Set(ranks)].sort((a, b) => a - b);
  const runs: [first: number, last: number][] = [];
  for (const rank of sorted) {
    const run = runs.at(-1);
    if (run && rank === run[1] + 1) {
      run[1] = rank;
    } else {
      runs.push([rank, rank]);
    }
  }
  return runs
    .map(([first, last]) => (first === last ? `${first}` : `${first}${last === first + 1 ? ', ' : '-'}${last}`))
    .join(', ');
}

/** The ranks of a text like `0-3, 7`; null if it is not one. An empty text is the empty set. */
export function parseRanks(text: string): number[] | null {
  const ranks = new Set<number>();
  for (const part of text.split(/[\s,]+/).filter(Boolean)) {
    const found = /^(\d{1,6})(?:[-:](\d{1,6}))?$/.exec(part);
    if (!found) {
      return null;
    }
    const first = Number(found[1]);
    const last = Number(found[2] ?? found[1]);
    if (last < first) {
      return null;
    }
    for (let rank = first; rank <= last; rank++) {
      ranks.add(rank);
    }
  }
  return [...ranks].sort((a, b) => a - b);
}

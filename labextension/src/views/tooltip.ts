import type { RankView } from '../model';
import { doingOf, memory, reasonOf, stateName, t, tn } from '../model';
import { element, setText } from './dom';
import { stateIcon } from './glyphs';

/** A place in the window (CSS pixels). */
export interface Place {
  readonly left: number;
  readonly top: number;
  readonly bottom: number;
}

/** A tooltip beside a cell: one element of the view, which stays inside the view and never takes the pointer. */
export class Tooltip {
  private readonly _node = element('div', 'mk-Tooltip', { role: 'tooltip', hidden: true });

  constructor(private readonly _root: HTMLElement) {
    _root.append(this._node);
  }

  /** Show content beside a place on the page. */
  show(content: Node, beside: Place): void {
    this._node.replaceChildren(content);
    this._node.hidden = false;
    const root = this._root.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this._node;
    const left = Math.min(beside.left - root.left, root.width - width - 4);
    const below = beside.bottom - root.top + 6;
    const above = beside.top - root.top - height - 6;
    const top = beside.bottom + 6 + height > window.innerHeight && above >= 0 ? above : below;
    this._node.style.transform = `translate(${Math.max(4, left)}px, ${top}px)`;
  }

  hide(): void {
    this._node.hidden = true;
  }

  dispose(): void {
    this._node.remove();
  }
}

function line(name: string, text: string): HTMLElement {
  const made = element('div', name);
  setText(made, text);
  return made;
}

/** What the tooltip of a rank says. */
export function rankTooltip(rank: RankView, hostName: string, now: number): HTMLElement {
  const box = element('div');
  const head = element('div', 'mk-Tooltip-head');
  head.append(
    stateIcon(rank.state, rank.older),
    line('mk-Tooltip-title', t('rank %1 · %2', rank.rank, stateName(rank.state)))
  );
  box.append(head);
  const reason = reasonOf(rank);
  const facts = [
    rank.waiting ? tn('%1 message waits', '%1 messages wait', rank.waiting) : '',
    rank.rss ? memory(rank.rss) : '',
    hostName
  ].filter(Boolean);
  for (const [name, text] of [
    ['mk-Tooltip-cause', reason],
    ['mk-Tooltip-doing', doingOf(rank, now)],
    ['mk-Tooltip-facts', facts.join(' · ')],
    ['mk-Tooltip-facts', rank.older ? t('modules of an older tree than its host has') : '']
  ] as const) {
    if (text) {
      box.append(line(name, text));
    }
  }
  return box;
}

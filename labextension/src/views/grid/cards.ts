import type { HostGroup, MeshStore, RankView } from '../../model';
import { describeRank, duration, isTrouble, memory, reasonOf, stateName, t } from '../../model';
import { Disposables, element, moveByArrows, setAttribute, setCutText, setText } from '../dom';
import { stateIcon } from '../glyphs';

/** The card of a rank: its number, its state, what it runs and for how long, or why it does not. */
class RankCard {
  readonly node: HTMLButtonElement;
  private _icon: Element;
  private _shown = '';
  private readonly _state = element('span', 'mk-Card-state');
  private readonly _what = element('span', 'mk-Card-what');
  private readonly _time = element('span', 'mk-Card-time');
  private readonly _doing = element('span', 'mk-Card-doing', {}, this._what, this._time);
  private readonly _facts = element('span', 'mk-Card-facts');

  constructor(
    rank: RankView,
    private readonly _store: MeshStore,
    private readonly _namesHost: boolean
  ) {
    this._icon = stateIcon(rank.state, rank.older);
    const head = element('span', 'mk-Card-head', {}, this._icon);
    head.append(element('span', 'mk-Card-rank', {}, String(rank.rank)), this._state);
    this.node = element('button', 'mk-Card', { type: 'button', tabindex: -1 }, head, this._doing, this._facts);
    this.update(rank);
  }

  update(rank: RankView): void {
    const now = this._store.now();
    const look = `${rank.state} ${rank.older}`;
    if (look !== this._shown) {
      const icon = stateIcon(rank.state, rank.older);
      this._icon.replaceWith(icon);
      this._icon = icon;
      this._shown = look;
      this.node.dataset['state'] = rank.state;
    }
    setText(this._state, stateName(rank.state));
    const reason = isTrouble(rank.state) ? reasonOf(rank) : '';
    setCutText(this._what, reason || rank.doing);
    setText(this._time, !reason && rank.doing && rank.doing_since ? duration(Math.max(0, now - rank.doing_since)) : '');
    setAttribute(this.node, 'data-reason', !!reason);
    const host = this._store.hostName(rank.host);
    const facts = [
      rank.rss ? memory(rank.rss) : '',
      rank.waiting ? t('%1 waiting', rank.waiting) : '',
      this._namesHost ? host : ''
    ];
    setCutText(this._facts, facts.filter(Boolean).join(' · '));
    setAttribute(this.node, 'aria-label', describeRank(rank, host, now));
  }
}

/** Up to sixteen ranks as cards, those of a host together. */
export class RankCards {
  readonly node = element('div', 'mk-Cards', { role: 'group' });
  private readonly _cards = new Map<number, RankCard>();
  private readonly _disposables = new Disposables();

  /**
   * @param pick - called with the number of the rank that was clicked.
   */
  constructor(
    host: HTMLElement,
    label: string,
    private readonly _store: MeshStore,
    groups: readonly HostGroup[],
    ranks: readonly RankView[],
    pick: (rank: number) => void
  ) {
    this.node.setAttribute('aria-label', label);
    // Where each rank has a host of its own, a line above each card would only take room.
    const own = groups.length > 1 && groups.every(group => group.ranks.length === 1);
    for (const group of groups) {
      const cards = group.ranks.flatMap(number => {
        const rank = ranks[number];
        if (!rank) {
          return [];
        }
        const card = new RankCard(rank, this._store, own);
        card.node.addEventListener('click', () => pick(number));
        this._cards.set(number, card);
        return [card.node];
      });
      if (own) {
        this.node.append(...cards);
      } else {
        const name = element('div', 'mk-Cards-host');
        setCutText(name, this._store.hostName(group.host));
        this.node.append(name, ...cards);
      }
    }
    moveByArrows(this.node, () => [...this._cards.values()].map(card => card.node), this._disposables);
    const first = this._cards.values().next().value;
    if (first) {
      first.node.tabIndex = 0;
    }
    host.append(this.node);
  }

  update(ranks: readonly RankView[]): void {
    for (const [number, card] of this._cards) {
      const rank = ranks[number];
      if (rank) {
        card.update(rank);
      }
    }
  }

  /** Mark the rank whose details are shown; -1: none. */
  select(rank: number): void {
    for (const [number, card] of this._cards) {
      setAttribute(card.node, 'aria-pressed', number === rank ? 'true' : undefined);
    }
  }

  focus(rank: number): void {
    this._cards.get(rank)?.node.focus();
  }

  dispose(): void {
    this._disposables.dispose();
    this.node.remove();
  }
}

import type { RankState, RankView } from '../model';
import { countStates, isTrouble, STATES, stateName, t, tn } from '../model';
import { button, Disposables, element, moveByArrows, setAttribute, setText } from './dom';
import { stateIcon } from './glyphs';

/**
 * How many ranks are in each state; each leads to the next rank in it.
 *
 * A state that was seen once keeps its place, so that nothing beside it moves when its count is 0 again.
 */
export class StateLegend {
  readonly node = element('div', 'mk-Legend', { role: 'group', 'aria-label': t('Ranks by state') });
  private readonly _chips = new Map<RankState | 'older', { node: HTMLButtonElement; count: Element }>();
  private readonly _disposables = new Disposables();

  /**
   * @param pick - called with the state whose next rank is to be shown; "older": ranks with modules of an older tree.
   */
  constructor(
    host: HTMLElement,
    private readonly _pick: (state: RankState | 'older') => void
  ) {
    moveByArrows(this.node, () => [...this.node.querySelectorAll('button')], this._disposables);
    host.append(this.node);
  }

  update(ranks: readonly RankView[]): void {
    const { states, older } = countStates(ranks);
    // As wide as the largest count can be, so that nothing moves when it grows.
    this.node.style.setProperty('--mk-digits', `${String(ranks.length).length}ch`);
    for (const state of STATES) {
      this._show(state, states[state]);
    }
    this._show('older', older);
  }

  dispose(): void {
    this._disposables.dispose();
    this.node.remove();
  }

  private _show(state: RankState | 'older', count: number): void {
    let chip = this._chips.get(state);
    if (!chip) {
      if (!count) {
        return;
      }
      chip = this._add(state);
    }
    setText(chip.count, String(count));
    setAttribute(chip.node, 'data-none', count === 0);
    const name = state === 'older' ? t('with modules of an older tree') : stateName(state);
    setAttribute(chip.node, 'aria-label', tn('%1 rank %2', '%1 ranks %2', count, name));
  }

  private _add(state: RankState | 'older') {
    const count = element('span', 'mk-Legend-count');
    const node = button('mk-Legend-chip', '', () => this._pick(state), {
      tabindex: this._chips.size ? -1 : 0,
      'data-trouble': state !== 'older' && isTrouble(state),
      title: state === 'older' ? t('Modules of an older tree than their hosts have') : t('Show the next one')
    });
    const name = state === 'older' ? t('older tree') : stateName(state);
    node.append(
      state === 'older' ? stateIcon('idle', true) : stateIcon(state),
      element('span', 'mk-Legend-name', {}, name),
      count
    );
    const chip = { node, count };
    this._chips.set(state, chip);
    // In the order of the states, whichever came first.
    this.node.replaceChildren(...[...STATES, 'older' as const].flatMap(each => this._chips.get(each)?.node ?? []));
    return chip;
  }
}

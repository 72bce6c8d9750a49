import type { FailureGroup, FailureView, MeshView, RankView, Trouble } from '../model';
import {
  endingOf,
  endingText,
  groupFailures,
  headlineOf,
  nameRanks,
  stateName,
  t,
  tn,
  troublesOf,
  wholeDuration
} from '../model';
import type { MeshStore } from '../model';
import { button, element, setAttribute, setCutText, setText } from './dom';
import { stateIcon } from './glyphs';

/** Earlier failures that are listed. */
const LISTED = 50;

/**
 * What is wrong: a headline, the worst trouble below it with its cause, and a list of all that opens.
 *
 * Its height does not depend on what there is to say; only the person opens the list.
 */
export class MeshNews {
  readonly node = element('div', 'mk-News');
  private readonly _headline = element('div', 'mk-News-headline');
  private readonly _name = element('span', 'mk-News-name');
  private readonly _count = element('span', 'mk-News-count');
  private readonly _news = element('span', 'mk-News-news');
  private readonly _spoken = element('div', 'mk-Spoken', { role: 'status' });
  private readonly _strip = element('div', 'mk-News-strip');
  private readonly _worst: HTMLButtonElement;
  private readonly _worstIcon = element('span', 'mk-News-icon');
  private readonly _worstText = element('span', 'mk-News-text');
  private readonly _more: HTMLButtonElement;
  private readonly _list = element('ul', 'mk-News-list', { hidden: true });
  private _troubles: Trouble[] = [];
  private _failures: FailureGroup[] = [];
  private _listed = '';
  /** What is shown, while it has a time that passes. */
  private _passing: (() => void) | undefined;

  /**
   * @param _pick - called with a rank that is to be shown.
   */
  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore,
    private readonly _pick: (rank: number) => void
  ) {
    this._worst = button('mk-News-worst', '', () => this._go(this._troubles[0]?.ranks));
    this._worst.append(this._worstIcon, this._worstText);
    this._more = button('mk-Button mk-News-more', '', () => this._toggle(), { 'aria-expanded': 'false' });
    this._headline.append(this._name, this._count, this._news);
    this._strip.append(this._worst, this._more);
    this.node.append(this._headline, this._strip, this._list, this._spoken);
    host.append(this.node);
  }

  update(mesh: MeshView | undefined, ranks: readonly RankView[], failures: readonly FailureView[]): void {
    const ending = endingOf(mesh, this._store.hosts, this._store.now());
    this._passing = ending || failures.length ? () => this.update(mesh, ranks, failures) : undefined;
    const headline = headlineOf(mesh, ranks, ending);
    setText(this._name, mesh?.name ?? '');
    setText(this._count, headline.count);
    setCutText(this._news, headline.news);
    setAttribute(this._headline, 'data-state', headline.state || undefined);
    this._troubles = troublesOf(ranks);
    this._failures = groupFailures(failures).slice(0, LISTED);
    const worst = this._troubles[0];
    const warning = mesh?.hang || (ending ? `${endingText(ending)}: ${ending.then}` : '');
    const text = worst ? this._sentence(worst) : warning || this._calm(ranks);
    setCutText(this._worstText, text);
    setAttribute(this._worst, 'data-state', worst?.state ?? (mesh?.hang ? 'hang' : warning ? 'walltime' : undefined));
    setAttribute(this._worst, 'disabled', !worst);
    this._icon(worst);
    const more = Math.max(0, this._troubles.length - 1) + this._failures.length;
    setText(this._more, more ? t('%1 more', more) : t('none'));
    setAttribute(this._more, 'data-empty', !more);
    if (!more && !this._list.hidden) {
      this._toggle();
    }
    // Screen readers hear of news, not of each number that changes.
    const spoken = worst || mesh?.hang ? text : ending ? ending.then : '';
    setText(this._spoken, spoken ? `${mesh?.name ?? ''}: ${spoken}` : '');
    this._fill();
  }

  /** Times have passed. */
  tick(): void {
    this._listed = '';
    this._passing?.();
    this._fill();
  }

  dispose(): void {
    this.node.remove();
  }

  private _icon(worst: Trouble | undefined): void {
    const wanted = worst?.state ?? '';
    if (this._worstIcon.dataset['state'] !== wanted) {
      this._worstIcon.dataset['state'] = wanted;
      this._worstIcon.replaceChildren(...(worst ? [stateIcon(worst.state)] : []));
    }
  }

  private _calm(ranks: readonly RankView[]): string {
    const last = this._failures[0];
    if (last) {
      const ago = wholeDuration(this._store.now() - last.last);
      return t('Nothing is wrong now; %1 ago, %2: %3', ago, nameRanks(last.ranks), last.text);
    }
    const failed = ranks.reduce((sum, rank) => sum + rank.failures, 0);
    return failed ? tn('%1 call has failed', '%1 calls have failed', failed) : t('Nothing has failed');
  }

  /** `ranks 3, 5 on b are dead: killed by signal 9 (SIGKILL)`. */
  private _sentence({ state, reason, ranks, hosts }: Trouble): string {
    const where = hosts.length === 1 ? this._store.hostName(hosts[0] ?? '') : tn('%1 host', '%1 hosts', hosts.length);
    const what = t('%1 on %2 · %3', nameRanks(ranks), where, stateName(state));
    return reason ? `${what}: ${reason}` : what;
  }

  private _go(ranks: readonly number[] | undefined): void {
    const first = ranks?.[0];
    if (first !== undefined) {
      this._pick(first);
    }
  }

  private _toggle(): void {
    this._list.hidden = !this._list.hidden;
    setAttribute(this._more, 'aria-expanded', String(!this._list.hidden));
    this._listed = '';
    this._fill();
  }

  private _fill(): void {
    if (this._list.hidden) {
      return;
    }
    const now = this._store.now();
    const lines = [
      ...this._troubles.slice(1).map(trouble => ({
        icon: trouble.state,
        text: this._sentence(trouble),
        ranks: trouble.ranks
      })),
      ...this._failures.map(({ text, ranks, count, last }) => ({
        icon: null,
        text: [t('%1 ago', wholeDuration(now - last)), count > 1 ? t('%1 times', count) : '', nameRanks(ranks), text]
          .filter(Boolean)
          .join(' · '),
        ranks
      }))
    ];
    const key = lines.map(line => line.text).join('\n');
    if (key === this._listed) {
      return;
    }
    this._listed = key;
    // Lines stay the same elements, so that the focus stays where it is.
    while (this._list.children.length > lines.length) {
      this._list.lastElementChild?.remove();
    }
    lines.forEach(({ icon, text, ranks }, index) => {
      let item = this._list.children[index] as HTMLElement | undefined;
      if (!item) {
        item = element(
          'li',
          '',
          {},
          button('mk-News-line', '', () => undefined)
        );
        this._list.append(item);
      }
      const line = item.firstElementChild as HTMLButtonElement;
      line.onclick = () => this._go(ranks);
      const words = element('span', 'mk-News-text', {}, text);
      line.replaceChildren(...(icon ? [stateIcon(icon), words] : [words]));
      setAttribute(line, 'data-state', icon ?? undefined);
      setAttribute(line, 'title', text);
    });
  }
}

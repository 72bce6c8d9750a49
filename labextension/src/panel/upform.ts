import type { Actions } from '../model';
import { t } from '../model';
import { button, element, setAttribute, setText } from '../views/dom';
import { askCode, wordsOf } from './actionbar';
import type { Surroundings } from './surroundings';

/** The fields of `%mesh up` that the form has, as the kernel takes them. */
export interface UpOptions {
  name?: string;
  procs?: number;
  dims?: Record<string, number>;
  sync?: boolean;
  keep?: boolean;
  reuse?: boolean;
  replace?: boolean;
}

let forms = 0;

/**
 * The form that brings a mesh up, or writes the code for it.
 *
 * Without `actions` (monarch_kernel is not loaded, so that there is nothing to ask) it runs the code in a cell.
 */
export class UpForm {
  readonly node = element('form', 'mk-Up', { autocomplete: 'off' });
  private readonly _name = field('mk-Up-name', { value: 'm', spellcheck: 'false' });
  private readonly _size = field('mk-Up-size', {
    value: '4',
    spellcheck: 'false',
    'aria-describedby': `mk-up-${forms}`
  });
  private readonly _sync = element('input', '', { type: 'checkbox' });
  private readonly _keep = element('input', '', { type: 'checkbox' });
  private readonly _reuse = element('input', '', { type: 'radio', name: `mk-up-taken-${forms}`, checked: true });
  private readonly _replace = element('input', '', { type: 'radio', name: `mk-up-taken-${forms}` });
  /** What to do where there is a mesh of that name. */
  private readonly _taken = element('div', 'mk-Up-taken');
  private readonly _start = element('button', 'mk-Button mk-mod-main', { type: 'submit' }, t('Bring up'));
  private readonly _result = element('div', 'mk-Bar-result', { role: 'status' });

  constructor(
    host: HTMLElement,
    private readonly _actions: Actions | null,
    private readonly _surroundings: Surroundings,
    private readonly _before = '',
    private readonly _names: () => Iterable<string> = () => []
  ) {
    this._name.value = freeName(_names());
    this._taken.hidden = true;
    this._taken.append(
      element('label', 'mk-Check', {}, this._reuse, t('Reuse the mesh of that name, with its variables')),
      element('label', 'mk-Check', {}, this._replace, t('Replace it: stop it first'))
    );
    this._name.addEventListener('input', () => this._named());
    this.node.append(
      labelled(t('Name'), this._name),
      this._taken,
      labelled(t('Processes'), this._size),
      element('div', 'mk-Faint mk-Up-help', { id: `mk-up-${forms++}` }, t('A number, or dimensions: hosts=2 gpus=4')),
      element('label', 'mk-Check', {}, this._sync, t('Sync folders first')),
      element('label', 'mk-Check', {}, this._keep, t('Keep it when the kernel ends')),
      element(
        'div',
        'mk-Up-buttons',
        {},
        this._start,
        button('mk-Button', t('Insert as code'), () => void this._go(true))
      ),
      this._result
    );
    this.node.addEventListener('submit', event => {
      event.preventDefault();
      void this._go(false);
    });
    host.append(this.node);
  }

  focus(): void {
    this._size.focus();
    this._size.select();
  }

  dispose(): void {
    this.node.remove();
  }

  private _named(): void {
    this._taken.hidden = ![...this._names()].includes(this._name.value.trim());
  }

  private async _go(asCode: boolean): Promise<void> {
    this._named();
    const read = readOptions(this._name.value, this._size.value, this._sync.checked, this._keep.checked);
    const taken = this._replace.checked ? { replace: true } : { reuse: true };
    const options = read && !this._taken.hidden ? { ...read, ...taken } : read;
    setAttribute(this._size, 'aria-invalid', options === null ? 'true' : undefined);
    if (!options) {
      this._say(t('Processes: a number such as 4, or dimensions such as hosts=2 gpus=4.'), true);
      this._size.focus();
      return;
    }
    this._start.disabled = true;
    try {
      if (!this._actions) {
        const code = `${this._before}${lineOf(options)}`;
        await (asCode ? this._surroundings.insertCode(code) : this._surroundings.runCode(code));
      } else if (asCode) {
        await this._surroundings.insertCode((await askCode(this._actions, 'up', '', [], { options })).code);
      } else {
        this._say(t('Bringing up …'));
        this._say((await this._actions.perform('up', '', [], { options })).text);
      }
    } catch (error) {
      this._say(wordsOf(error), true);
    } finally {
      this._start.disabled = false;
    }
  }

  private _say(text: string, bad = false): void {
    setText(this._result, text);
    setAttribute(this._result, 'data-bad', bad);
  }
}

/** The first name that no mesh has: m, m2, m3. */
export function freeName(names: Iterable<string>): string {
  const taken = new Set(names);
  let number = 1;
  while (taken.has(number > 1 ? `m${number}` : 'm')) {
    number++;
  }
  return number > 1 ? `m${number}` : 'm';
}

/** The fields of the form; null if the size makes no sense. A name may be empty: the kernel then gives its own. */
export function readOptions(name: string, size: string, sync: boolean, keep: boolean): UpOptions | null {
  const options: UpOptions = {
    ...(name.trim() ? { name: name.trim() } : {}),
    ...(sync ? { sync } : {}),
    ...(keep ? { keep } : {})
  };
  const words = size.trim().split(/[\s,]+/);
  if (words.length === 1 && /^[1-9]\d*$/.test(words[0] ?? '')) {
    return { ...options, procs: Number(words[0]) };
  }
  const dims: Record<string, number> = {};
  for (const word of words) {
    const found = /^([a-z_]\w*)=([1-9]\d*)$/i.exec(word);
    if (!found?.[1] || found[1] in dims) {
      return null;
    }
    dims[found[1]] = Number(found[2]);
  }
  return { ...options, dims };
}

/** The line that brings a mesh up, for a kernel that cannot be asked for it. */
export function lineOf({ name, procs, dims, sync, keep }: UpOptions): string {
  const words = ['%mesh up'];
  if (name) {
    words.push(name);
  }
  for (const [label, size] of Object.entries(dims ?? {})) {
    words.push(`${label}=${size}`);
  }
  if (procs) {
    words.push(`--procs ${procs}`);
  }
  return [...words, ...(keep ? ['--keep'] : []), ...(sync ? ['--sync'] : [])].join(' ');
}

function field(name: string, attributes: Record<string, string>): HTMLInputElement {
  return element('input', `mk-Input ${name}`, attributes);
}

function labelled(text: string, input: HTMLInputElement): HTMLLabelElement {
  return element('label', 'mk-Field', {}, element('span', 'mk-Field-name', {}, text), input);
}

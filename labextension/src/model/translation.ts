/**
 * The text that people see, in their language. The widget shows it as it is written; the panel gives JupyterLab's
 * translation bundle, which has the same two methods.
 */
export interface TranslationBundle {
  __(text: string, ...values: unknown[]): string;
  _n(one: string, many: string, count: number, ...values: unknown[]): string;
}

function fill(text: string, values: readonly unknown[]): string {
  return text.replace(/%(\d)/g, (hole, number: string) => {
    const value = values[Number(number) - 1];
    return value === undefined ? hole : String(value);
  });
}

const AS_WRITTEN: TranslationBundle = {
  __: (text, ...values) => fill(text, values),
  _n: (one, many, count, ...values) => fill(count === 1 ? one : many, [count, ...values])
};

let bundle = AS_WRITTEN;

/** Use this bundle from now on; without one, text stays as it is written. */
export function useTranslation(chosen: TranslationBundle = AS_WRITTEN): void {
  bundle = chosen;
}

/** A text, with `%1`, `%2`, … replaced by the values. */
export function t(text: string, ...values: unknown[]): string {
  return bundle.__(text, ...values);
}

/** A text that depends on a count, which is its `%1`; further values are `%2`, … */
export function tn(one: string, many: string, count: number, ...values: unknown[]): string {
  return bundle._n(one, many, count, ...values);
}

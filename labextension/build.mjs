// Builds what is shipped: the prebuilt extension of JupyterLab (prebuilt), and the widget's module, which the
// Python package carries (monarch_kernel/widgets/static/mesh.js).
import { spawn } from 'node:child_process';
import { createRequire } from 'node:module';
import { fileURLToPath } from 'node:url';
import * as esbuild from 'esbuild';

const here = fileURLToPath(new URL('.', import.meta.url));
const resolve = createRequire(import.meta.url).resolve;

const common = { absWorkingDir: here, bundle: true, format: 'esm', target: 'es2022', legalComments: 'none' };
const bundles = [
  // What JupyterLab shares stays an import: its builder wires it to the page's own copies.
  { ...common, entryPoints: ['src/index.ts'], outfile: 'lib/index.js', packages: 'external' },
  {
    ...common,
    entryPoints: ['src/widget/index.ts'],
    outfile: '../monarch_kernel/widgets/static/mesh.js',
    minify: true,
    loader: { '.css': 'text' }
  }
];

/** JupyterLab's own builder, on the module that esbuild wrote; the lists of shared packages come with a package. */
function extension() {
  const builder = resolve('@jupyter/builder/lib/build-labextension.js');
  const core = resolve('@jupyterlab/core-meta/core.package.json');
  const child = spawn(process.execPath, [builder, '--core-package-file', core, here], {
    cwd: here,
    stdio: ['ignore', 'pipe', 'inherit']
  });
  let said = '';
  child.stdout.on('data', text => (said += text));
  child.on('exit', code => {
    if (code) process.stderr.write(said);
    process.exitCode = code ?? 1;
  });
}

await Promise.all(bundles.map(options => esbuild.build(options)));
extension();

// For @jupyter/builder: numbers of modules by their order. By default they hash paths of this machine, and what is
// built in two places differs.
module.exports = { optimization: { moduleIds: 'natural', chunkIds: 'natural' } };

// The drafter's fc over the hidden states of the tapped target layers (DFlashDrafter.observe): the
// first of two launches that put committed positions into the context of all draft layers. The states
// are read where they are, the rows that were accepted out of all that were verified. Beside each row's
// outputs it leaves the squares that hidden_norm needs of them, summed over a threadgroup's outputs;
// head_projection.metal adds those up.
//
// A threadgroup makes 8 * TILES outputs of all rows; its SIMDS simdgroups take every SIMDS-th step of
// 64 columns and add up in order of their number.

constexpr int WIDTH = TILES * 8, HEIGHT = ROW_TILES * 8;
threadgroup float partial[SIMDS][HEIGHT][WIDTH];
const int rows = row_count, width = tap0_shape[1], outputs = weights_shape[0];
const int group = int(threadgroup_position_in_grid.x), first = group * WIDTH;
const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
const int thread_index = int(thread_index_in_threadgroup);

device const X* const taps[8] = {tap0, tap1, tap2, tap3, tap4, tap5, tap6, tap7};
Inputs<X, TAPS> x;
x.width = width;
for (int i = 0; i < TAPS; i++) x.parts[i] = taps[i] + size_t(first_row) * width;
Tile<W, S> tiles[TILES];
for (int t = 0; t < TILES; t++) tiles[t] = {weights, scales, biases, first + 8 * t, outputs};

simdgroup_float8x8 sums[ROW_TILES][TILES];
float squares[ROW_TILES];
multiply_rows<X, W, S, S, BITS, GROUP, TAPS, ROW_TILES, TILES, PLAIN>(
    x, rows, tiles, TAPS * width, int(simd), SIMDS, scales, lane, sums, squares);
store_products<ROW_TILES, TILES>(sums, &partial[simd][0][0], WIDTH, lane);
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int i = thread_index; i < rows * WIDTH; i += SIMDS * 32) {
    const int m = i / WIDTH, n = i % WIDTH;
    const float sum = sum_in_order(&partial[0][m][n], SIMDS, HEIGHT * WIDTH);
    if (first + n < outputs) y[size_t(m) * outputs + first + n] = sum;
    // Outputs that are not there are zero. Nobody else reads this place before the barrier.
    partial[0][m][n] = sum * sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int m = thread_index; m < rows; m += SIMDS * 32)
    row_squares[size_t(group) * rows + m] = sum_in_order(&partial[0][m][0], WIDTH, 1);

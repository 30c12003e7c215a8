// A causal convolution over a block's rows with coefficients for each row and channel (a DFlash 2
// layer, on both sides of attention and of the MLP): y[t] = sum over taps k of c[t, k] * x[t - k], rows
// before the block being zero. A coefficient is the sum of one for the channel, base [TAPS, hidden],
// and one for the row and the channel's group, dynamic [rows, TAPS, groups].
// NORM: x is normed first, and every threadgroup makes the sums of squares of the rows it reads.
// RESIDUAL: y gets it added. A thread makes one channel of one row.

constexpr int SIMDS = THREADS / 32;
threadgroup float squares[TAPS][SIMDS];
const int hidden = x_shape[1], width = hidden / dynamic_shape[2];
const int thread_index = int(thread_position_in_threadgroup.x);
const int channel = int(thread_position_in_grid.x), row = int(thread_position_in_grid.y);
const int taps = min(TAPS, row + 1);

if (NORM) {
    for (int k = 0; k < taps; k++) {
        float sum = 0;
        for (int i = thread_index; i < hidden; i += THREADS) {
            const float number = float(x[size_t(row - k) * hidden + i]);
            sum += number * number;
        }
        sum = simd_sum(sum);
        if (thread_index % 32 == 0) squares[k][thread_index / 32] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
if (channel >= hidden) return;

float sum = 0;
for (int k = 0; k < taps; k++) {
    const size_t place = row * dynamic_strides[0] + k * dynamic_strides[1] +
                         channel / width * dynamic_strides[2];
    float number = float(x[size_t(row - k) * hidden + channel]);
    if (NORM)
        number *= rsqrt(sum_in_order(squares[k], SIMDS, 1) / float(hidden) + norm_eps) * float(norm[channel]);
    sum += (float(base[k * hidden + channel]) + float(dynamic[place])) * number;
}
const size_t place = size_t(row) * hidden + channel;
if (RESIDUAL) sum += float(residual[place]);
y[place] = T(sum);

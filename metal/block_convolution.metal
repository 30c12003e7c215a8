// A causal convolution over a block's rows with coefficients for each row and channel (a DFlash 2
// layer, on both sides of attention and of the MLP): y[t] = sum over taps k of c[t, k] * x[t - k], rows
// before the block being zero. RESIDUAL: y gets it added. A thread makes one channel of one row.

const int hidden = x_shape[1], taps = coefficients_shape[1];
const int channel = int(thread_position_in_grid.x), row = int(thread_position_in_grid.y);

float sum = 0;
for (int k = 0; k < min(taps, row + 1); k++) {
    const size_t place = row * coefficients_strides[0] + k * coefficients_strides[1] +
                         channel * coefficients_strides[2];
    sum += float(coefficients[place]) * float(x[size_t(row - k) * hidden + channel]);
}
const size_t place = size_t(row) * hidden + channel;
if (RESIDUAL) sum += float(residual[place]);
y[place] = T(sum);

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Random;
import java.util.concurrent.locks.LockSupport;

/**
 * A fixed mix of requests for the benchmark `jvm`: each makes garbage and reads a value by a Zipf-distributed key from
 * a cache (least recently used goes first); a value that is not there is computed again.
 *
 * Arguments: live set in MiB, cache in MiB, which holds all values, and microseconds of CPU time that each request also
 * works for (0 where there is no third one). Lines in: "cache MIB" bounds the cache, "run SECONDS"
 * works in two threads, each at 400 requests a second or as many as it can do, and prints requests, hits and the
 * response times' median, p99 and mean in microseconds.
 */
public class Mix {
    private static final int BLOCK = 16 * 1024;
    private static final int PER_MIB = 1024 * 1024 / BLOCK;
    private static final int GARBAGE = 256 * 1024;
    private static final long INTERVAL_NS = 2_500_000;
    private static final int ROUNDS = 12;
    private static final double SKEW = 0.9;
    private static final int THREADS = 2;
    private static final LinkedHashMap<Integer, byte[]> cache = new LinkedHashMap<>(16, 0.75f, true);
    private static byte[][] live;
    private static double[] zipf;
    private static int bound;
    private static final ThreadMXBean CLOCK = ManagementFactory.getThreadMXBean();
    private static long workNs;
    private static int turn;
    static volatile int sink;

    public static void main(String[] arguments) throws IOException, InterruptedException {
        live = new byte[Integer.parseInt(arguments[0]) * PER_MIB][];
        for (int i = 0; i < live.length; i++) {
            live[i] = compute(i, 1);
        }
        bound = Integer.parseInt(arguments[1]) * PER_MIB;
        workNs = arguments.length > 2 ? Long.parseLong(arguments[2]) * 1000 : 0;
        zipf = new double[bound];
        double sum = 0;
        for (int i = 0; i < zipf.length; i++) {
            sum += 1 / Math.pow(i + 1, SKEW);
            zipf[i] = sum;
        }
        for (int i = bound - 1; i >= 0; i--) {
            cache.put(i, compute(i, 1));
        }
        System.out.println("ready");
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        for (String line; (line = lines.readLine()) != null; ) {
            String[] words = line.split(" ");
            if (words[0].equals("cache")) {
                synchronized (cache) {
                    bound = Integer.parseInt(words[1]) * PER_MIB;
                    trim();
                }
                System.out.println("ok");
            } else {
                System.out.println(run(Double.parseDouble(words[1])));
            }
            System.out.flush();
        }
    }

    private static String run(double seconds) throws InterruptedException {
        long end = System.nanoTime() + (long) (seconds * 1e9);
        turn++;
        long[][] times = new long[THREADS][];
        long[] hits = new long[THREADS];
        Thread[] threads = new Thread[THREADS];
        for (int i = 0; i < THREADS; i++) {
            int number = i;
            threads[i] = new Thread(() -> times[number] = work(number, end, hits));
            threads[i].start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        long[] all = Arrays.stream(times).flatMapToLong(Arrays::stream).sorted().toArray();
        double mean = Arrays.stream(all).average().orElse(0);
        return all.length + " " + Arrays.stream(hits).sum() + " " + all[all.length / 2] / 1e3 + " "
                + all[(int) (all.length * 0.99)] / 1e3 + " " + mean / 1e3;
    }

    private static long[] work(int number, long end, long[] hits) {
        // Other keys in every run, the same ones in every JVM.
        Random random = new Random(THREADS * turn + number);
        long[] times = new long[1 << 12];
        int count = 0;
        long next = System.nanoTime();
        while (next < end) {
            long began = System.nanoTime();
            if (request(random)) {
                hits[number]++;
            }
            long after = System.nanoTime();
            if (count == times.length) {
                times = Arrays.copyOf(times, 2 * count);
            }
            times[count++] = after - began;
            // At a fixed rate; who is late goes on at once, and does not make up for what was left out.
            next = Math.max(next + INTERVAL_NS, after);
            LockSupport.parkNanos(next - after);
        }
        return Arrays.copyOf(times, count);
    }

    private static boolean request(Random random) {
        if (workNs > 0) {
            long end = CLOCK.getCurrentThreadCpuTime() + workNs;
            while (CLOCK.getCurrentThreadCpuTime() < end) {
                sink++;
            }
        }
        byte[] garbage = new byte[GARBAGE];
        Arrays.fill(garbage, (byte) 1);
        int at = Arrays.binarySearch(zipf, random.nextDouble() * zipf[zipf.length - 1]);
        int key = Math.min(at < 0 ? -at - 1 : at, zipf.length - 1);
        byte[] value;
        synchronized (cache) {
            value = cache.get(key);
        }
        boolean hit = value != null;
        if (!hit) {
            value = compute(key, ROUNDS);
            synchronized (cache) {
                cache.put(key, value);
                trim();
            }
        }
        int sum = garbage[7] + live[key % live.length][9];
        for (int i = 0; i < value.length; i += 64) {
            sum += value[i];
        }
        sink = sum;
        return hit;
    }

    private static void trim() {
        Iterator<Integer> oldest = cache.keySet().iterator();
        while (cache.size() > bound) {
            oldest.next();
            oldest.remove();
        }
    }

    private static byte[] compute(int key, int rounds) {
        byte[] made = new byte[BLOCK];
        int state = key + 1;
        for (int round = 0; round < rounds; round++) {
            for (int i = 0; i < BLOCK; i++) {
                state ^= state << 13;
                state ^= state >>> 17;
                state ^= state << 5;
                made[i] ^= (byte) state;
            }
        }
        return made;
    }
}

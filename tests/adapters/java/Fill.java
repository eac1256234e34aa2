import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;

/**
 * A service for tests: holds a live set and a cache in arrays of 16 KiB, and answers lines on a loopback port.
 *
 * Arguments: live set in MiB, cache in MiB. Prints its port. Lines: "get" makes some garbage and checks a block,
 * "cache MIB" fills or drops the cache to that size, "churn MIB" makes that much garbage.
 */
public class Fill {
    private static final int BLOCK = 16 * 1024;
    private static final int PER_MIB = 1024 * 1024 / BLOCK;
    private static final ArrayDeque<byte[]> cache = new ArrayDeque<>();
    private static byte[][] live;

    public static void main(String[] arguments) throws IOException {
        live = new byte[Integer.parseInt(arguments[0]) * PER_MIB][];
        for (int i = 0; i < live.length; i++) {
            live[i] = block(i);
        }
        resize(Integer.parseInt(arguments[1]));
        try (ServerSocket server = new ServerSocket(0, 50, InetAddress.getByName("127.0.0.1"))) {
            System.out.println(server.getLocalPort());
            System.out.flush();
            while (true) {
                Socket client = server.accept();
                Thread thread = new Thread(() -> serve(client));
                thread.setDaemon(true);
                thread.start();
            }
        }
    }

    private static void serve(Socket client) {
        try (client) {
            client.setTcpNoDelay(true);
            BufferedReader lines =
                    new BufferedReader(new InputStreamReader(client.getInputStream(), StandardCharsets.US_ASCII));
            PrintWriter answers = new PrintWriter(client.getOutputStream(), false, StandardCharsets.US_ASCII);
            int asked = 0;
            for (String line; (line = lines.readLine()) != null; ) {
                String[] words = line.split(" ");
                switch (words[0]) {
                    case "get":
                        byte[] garbage = block(asked);
                        int at = asked++ % live.length;
                        answers.print(live[at][1] == (byte) at && garbage[1] == (byte) (asked - 1) ? "ok\n" : "wrong\n");
                        break;
                    case "cache":
                        resize(Integer.parseInt(words[1]));
                        answers.print("ok\n");
                        break;
                    case "churn":
                        int sum = 0;
                        for (int i = 0; i < Integer.parseInt(words[1]) * PER_MIB; i++) {
                            sum += block(i)[1];
                        }
                        answers.print(sum == Integer.MIN_VALUE ? "wrong\n" : "ok\n");
                        break;
                    default:
                        answers.print("unknown\n");
                }
                answers.flush();
            }
        } catch (IOException gone) {
            // A client that went away is no news.
        }
    }

    private static synchronized void resize(int mib) {
        while (cache.size() > mib * PER_MIB) {
            cache.removeFirst();
        }
        while (cache.size() < mib * PER_MIB) {
            cache.addLast(block(cache.size()));
        }
    }

    /** Every page is written, so that it is resident. */
    private static byte[] block(int number) {
        byte[] made = new byte[BLOCK];
        for (int i = 1; i < BLOCK; i += 4096) {
            made[i] = (byte) number;
        }
        return made;
    }
}
